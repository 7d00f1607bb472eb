"""Tests that only one active run holds a name, even when holders are killed."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.kit.time_limits import allow_s
from tests.record.programs import RIVAL, line_of, program
from tfcluster.base.errors import ActiveRunError
from tfcluster.record.liveness import identity, try_lock
from tfcluster.record.run_locks import hold_name

NOW_S = 1795169700.0
RUN = "digits-20261120-101500-3f2a"


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_the_second_is_told_who_has_the_name_and_what_to_do(tmp_path: Path) -> None:
    hold = hold_name(tmp_path, "digits", RUN, now_s=NOW_S)
    began_s = time.monotonic()
    with pytest.raises(ActiveRunError) as caught:
        hold_name(tmp_path, "digits", "other", now_s=NOW_S)
    assert time.monotonic() - began_s < allow_s(2)  # refused at once
    host = os.uname().nodename
    assert caught.value.message == (
        f"the run {RUN} already uses the name 'digits' since 10:15:00 "
        f"(pid {os.getpid()} on {host})"
    )
    assert caught.value.hint == "use --name OTHER, or run `tfcluster stop digits` first"
    assert caught.value.exit_code == 7
    hold_name(tmp_path, "letters", RUN, now_s=NOW_S).release()
    hold.release()
    hold_name(tmp_path, "digits", "other", now_s=NOW_S).release()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\n"])
def test_a_name_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        hold_name(tmp_path, name, RUN, now_s=NOW_S)


@pytest.mark.timeout(120)
def test_of_twenty_at_once_exactly_one_wins_and_the_rest_know_who(
    tmp_path: Path,
) -> None:
    trials = int(os.environ.get("TFCLUSTER_CHAOS_TRIALS", "2"))
    for _ in range(trials):
        with ExitStack() as stack:
            rivals = [
                stack.enter_context(program(RIVAL, tmp_path, f"run-{i}"))
                for i in range(20)
            ]
            for rival in rivals:
                assert line_of(rival) == "ready"
            for rival in rivals:
                assert rival.stdin
                rival.stdin.write("go\n")
                rival.stdin.flush()
            answers = [line_of(rival) for rival in rivals]
            winner = answers.index("won")
            del answers[winner]
            wanted = (
                rf"lost: the run run-{winner} already .*\(pid {rivals[winner].pid} on "
            )
            for answer in answers:
                assert re.match(wanted, answer), answer
            # Leaving the block kills all rivals, which frees the name for the next
            # trial.


def test_who_held_the_name_before_is_not_blamed(tmp_path: Path) -> None:
    """The file is locked a moment before its new content is written."""
    hold_name(tmp_path, "digits", "old", now_s=NOW_S).release()
    path = tmp_path / "names" / "digits.lock"
    me = asdict(identity())
    path.write_text(json.dumps({"run": "old", "since": NOW_S, **me, "start_time": 1}))
    lock = try_lock(path)
    assert lock
    writing = threading.Timer(0.05, lock.write, ({"run": "new", **me},))
    writing.start()
    with pytest.raises(ActiveRunError, match="the run new already uses the name"):
        hold_name(tmp_path, "digits", RUN, now_s=NOW_S)
    writing.join()
    lock.release()


def test_a_holder_that_was_killed_leaves_the_name_free(tmp_path: Path) -> None:
    with program(RIVAL, tmp_path, "run-0") as rival:
        rival_line = line_of(rival)
        assert rival_line == "ready"
        assert rival.stdin
        rival.stdin.write("go\n")
        rival.stdin.flush()
        assert line_of(rival) == "won"
        with pytest.raises(ActiveRunError, match="run-0"):
            hold_name(tmp_path, "digits", RUN, now_s=NOW_S)
        rival.kill()
        rival.wait()
        hold_name(tmp_path, "digits", RUN, now_s=NOW_S).release()
    files = list((tmp_path / "names").iterdir())
    assert [file.name for file in files] == ["digits.lock"]  # never removed

"""Tests that a dead launcher is never shown as running, nor a living one as dead."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.record.programs import BEGIN_RUN, WAIT, line_of, program
from tfcluster.base.errors import ActiveRunError
from tfcluster.base.states import RunState, TaskState
from tfcluster.record.events import Writer
from tfcluster.record.liveness import (
    SILENCE_S,
    Signs,
    acquire,
    by_signs,
    identity,
    signs,
)
from tfcluster.record.load_run import read_run, read_summary
from tfcluster.record.paths import RunPaths, create_run
from tfcluster.record.run_status import LauncherView, RunView, TaskView

NOW_S = 1795169700.0


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "digits", NOW_S)


_SILENT = Signs(
    held=False,
    same_boot=False,
    same_host=False,
    process=None,
    heartbeat_s=NOW_S - 1000,
)


FAR = RunView(
    run="r",
    name="r",
    state=RunState.RUNNING,
    launcher=LauncherView(pid=1, host="far", boot_id="b", start_time=1),
)


def _signs(**extra: Any) -> Signs:
    return replace(_SILENT, **extra)


# --- the verdict, from signs ---------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "life", "reason"),
    [
        (
            _signs(held=True, same_boot=True, same_host=True, process=True),
            "alive",
            None,
        ),
        (
            _signs(same_boot=True, same_host=True, process=True),
            "dead",
            "the launcher died",
        ),
        (
            _signs(held=True, same_boot=True, same_host=True, process=False),
            "dead",
            "the launcher died",
        ),
        # A container on the same kernel: its lock can be seen, its pid is not
        # comparable.
        (_signs(held=True, same_boot=True), "alive", None),
        (_signs(same_boot=True), "dead", "the launcher died"),
        (_signs(same_host=True), "dead", "interrupted by a reboot"),
        (_signs(held=True), "alive", None),
        (_signs(heartbeat_s=NOW_S - SILENCE_S + 1), "alive", None),
        (_signs(), "unknown", "no sign of life from the launcher"),
        (_signs(held=None, heartbeat_s=None), "unknown", "no sign of life"),
    ],
)
def test_the_verdict(seen: Signs, life: str, reason: str | None) -> None:
    shown = by_signs(FAR, seen, now_s=NOW_S)
    assert (shown is FAR) == (life == "alive")
    assert (shown.state is RunState.LOST) == (life == "dead")
    assert (shown.reason or "").startswith(reason or "")
    assert bool(shown.reason) == bool(reason)


def test_before_the_first_event_only_silence_means_death() -> None:
    view = replace(FAR, launcher=None)
    fresh = _signs(heartbeat_s=NOW_S - 1)
    assert by_signs(view, fresh, now_s=NOW_S) is view
    assert by_signs(view, _signs(held=True), now_s=NOW_S) is view
    assert by_signs(view, _signs(), now_s=NOW_S).state is RunState.LOST


def test_a_launcher_elsewhere_is_never_guessed_dead() -> None:
    for held, heartbeat_s in itertools.product(
        (True, False, None), (None, 0.0, NOW_S - 1, NOW_S + 3600)
    ):
        seen = _signs(held=held, heartbeat_s=heartbeat_s)
        assert by_signs(FAR, seen, now_s=NOW_S).state is RunState.RUNNING


def test_a_lost_run_has_lost_its_tasks_and_an_exit_code() -> None:
    view = replace(
        FAR,
        tasks=(
            TaskView(task="worker:0", state=TaskState.RUNNING),
            TaskView(task="worker:1", state=TaskState.SUCCEEDED),
        ),
    )
    dead = _signs(same_boot=True, heartbeat_s=NOW_S)
    lost = by_signs(view, dead, now_s=NOW_S)
    assert (lost.state, lost.exit_code, lost.ended_s) == (RunState.LOST, 5, NOW_S)
    assert [t.state for t in lost.tasks] == [TaskState.LOST, TaskState.SUCCEEDED]
    ended = replace(view, state=RunState.STOPPED)
    assert by_signs(ended, dead, now_s=NOW_S) == ended


def test_what_nobody_here_can_know_keeps_its_state_and_says_so() -> None:
    shown = by_signs(FAR, _signs(heartbeat_s=NOW_S), now_s=NOW_S + 1000)
    assert shown.state is RunState.RUNNING
    assert shown.to_json()["unknown_since"] == "2026-11-20T10:15:00Z"
    assert "it runs on far, check there" in (shown.reason or "")


# --- real processes ------------------------------------------------------------------


def test_identity_is_that_of_the_process() -> None:
    me = identity()
    assert me == identity(os.getpid())
    assert me.pid == os.getpid()
    with program("import sys; sys.stdin.read()") as other:
        assert identity(other.pid).start_time >= me.start_time
    with pytest.raises(ProcessLookupError):
        identity(other.pid)


def test_a_process_may_call_itself_anything() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write('a) R 1 2'); "
    code += "print('x', flush=True); sys.stdin.read()"
    with program(code) as other:
        line_of(other)
        assert identity(other.pid).start_time >= identity().start_time


def test_a_zombie_has_died() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        identity(dead.pid)
    dead.wait()


def test_one_launcher_for_each_run(paths: RunPaths) -> None:
    lock = acquire(paths)
    with pytest.raises(ActiveRunError, match=paths.run):
        acquire(paths)
    assert json.loads(paths.lock.read_text()) == asdict(identity())
    lock.release()
    acquire(paths).release()


def test_a_run_is_alive_with_its_launcher_and_lost_after_kill(paths: RunPaths) -> None:
    with program(BEGIN_RUN + WAIT, paths.root) as launcher:
        assert line_of(launcher) == "begun"
        alive = read_run(paths, now_s=time.time() + 1e6)
        assert alive.state is RunState.STARTING
        assert alive.launcher
        assert alive.launcher.pid == launcher.pid
        launcher.kill()
        launcher.wait()
        for read in (read_run, read_summary):
            lost = read(paths, now_s=time.time())
            assert (lost.state, lost.reason) == (RunState.LOST, "the launcher died")
            assert lost.exit_code == 5


def test_a_stopped_launcher_is_alive(paths: RunPaths) -> None:
    with program(BEGIN_RUN + WAIT, paths.root) as launcher:
        line_of(launcher)
        launcher.send_signal(19)
        assert read_run(paths, now_s=time.time() + 1e6).state is RunState.STARTING


def test_a_lock_file_is_not_believed_only_the_lock(paths: RunPaths) -> None:
    """The pid of the old launcher was reused by another process."""
    me = identity()
    paths.lock.write_text(json.dumps(asdict(me)))
    old = replace(me, start_time=me.start_time - 1)
    writer = Writer(paths)
    writer.append({"type": "run", "run": paths.run, **asdict(old)})
    assert writer.close(5)
    assert signs(paths, old).process is False
    assert read_run(paths, now_s=time.time()).state is RunState.LOST


def test_after_a_reboot_the_run_is_lost(paths: RunPaths) -> None:
    before = replace(identity(), boot_id="another")
    writer = Writer(paths)
    writer.append({"type": "run", "run": paths.run, **asdict(before)})
    assert writer.close(5)
    view = read_run(paths, now_s=time.time())
    assert (view.state, view.reason) == (RunState.LOST, "interrupted by a reboot")


def test_a_run_of_another_host_is_unknown_once_it_is_silent(paths: RunPaths) -> None:
    far = replace(identity(), boot_id="another", host="far")
    writer = Writer(paths)
    writer.append({"type": "run", "run": paths.run, **asdict(far)})
    writer.append({"type": "state", "state": "running"})
    assert writer.close(5)
    now_s = time.time()
    assert read_run(paths, now_s=now_s).unknown_since_s is None
    for file in (paths.events, paths.root):
        os.utime(file, (now_s - 100, now_s - 100))
    view = read_run(paths, now_s=now_s)
    assert view.state is RunState.RUNNING
    assert view.unknown_since_s == pytest.approx(now_s - 100, abs=1)


def test_a_fresh_lock_file_is_a_sign_of_life(paths: RunPaths) -> None:
    lock = acquire(paths)
    for file in (paths.lock, paths.root):
        os.utime(file, (1, 1))
    assert signs(paths, None).heartbeat_s == 1
    os.utime(paths.lock)
    assert (signs(paths, None).heartbeat_s or 0) > NOW_S / 2
    lock.release()


def test_looking_does_not_disturb_who_wants_the_lock(paths: RunPaths) -> None:
    """A process that checks the lock holds it for a moment itself."""
    acquire(paths).release()
    looker = os.open(paths.lock, os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    done = threading.Timer(0.05, os.close, (looker,))
    done.start()
    acquire(paths).release()
    done.join()

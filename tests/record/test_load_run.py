"""Tests of loading a run from its folder: quickly, and even from incomplete files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.kit.time_limits import allow_s
from tests.record.programs import MANY_SHORT_RUNS, line_of, program
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.base.states import RunState
from tfcluster.record import events
from tfcluster.record.events import Writer
from tfcluster.record.files import replace_json
from tfcluster.record.load_run import RunReader, read_run, read_summary
from tfcluster.record.paths import RunPaths, create_run
from tfcluster.record.run_status import RunView

NOW_S = 1795169700.0


@pytest.fixture
def large_run(tmp_path: Path) -> RunPaths:
    """Record 3,000 tasks on 1,000 hosts that went through all their states."""
    paths = create_run(tmp_path, "large", NOW_S)
    names = [f"worker:{i}" for i in range(3000)]
    tasks = [{"task": name, "host": f"n{i // 3}"} for i, name in enumerate(names)]
    replace_json(paths.plan, {"name": "large", "backend": "ssh", "tasks": tasks})
    writer = Writer(paths, clock=lambda: NOW_S)
    writer.append({"type": "run", "run": paths.run, "name": "large", "backend": "ssh"})
    for state in ("starting", "running", "stopping", "succeeded"):
        for pid, name in enumerate(names):
            event = {"type": "task", "task": name, "attempt": 0, "state": state}
            writer.append({**event, "pid": pid, "address": f"n{pid // 3}:40000"})
    writer.progress({name: {"step": 7} for name in names})
    writer.append({"type": "end", "state": "succeeded", "exit_code": 0})
    assert writer.close(30)
    return paths


def test_a_launcher_that_died_before_its_first_event_is_known_at_once(
    tmp_path: Path,
) -> None:
    paths = create_run(tmp_path, "digits", time.time())
    assert read_run(paths, now_s=time.time()).state is RunState.STARTING
    code = (
        f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r})\n"
        "from pathlib import Path\n"
        "from tfcluster.record import liveness, paths\n"
        f"liveness.acquire(paths.RunPaths(Path({str(paths.root)!r})))\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    for read in (read_run, read_summary):
        view = read(paths, now_s=time.time())
        assert view.state is RunState.LOST
        assert view.reason == "the launcher died before the run started"


def test_a_large_run_is_read_in_no_time(large_run: RunPaths) -> None:
    began_s = time.process_time()
    view = read_run(large_run, now_s=NOW_S)
    assert time.process_time() - began_s < allow_s(1)
    assert len(view.tasks) == 3000
    assert {(str(t.state), t.step) for t in view.tasks} == {("succeeded", 7)}
    began_s = time.process_time()
    summary = read_summary(large_run, now_s=NOW_S)
    assert time.process_time() - began_s < allow_s(0.05)
    for each in (view, summary):
        assert (each.run, each.name, each.backend) == (large_run.run, "large", "ssh")
        assert (each.state, each.exit_code) == (RunState.SUCCEEDED, 0)
        assert each.started_s == NOW_S


def test_whatever_is_left_of_a_folder_can_be_read(large_run: RunPaths) -> None:
    large_run.plan.write_bytes(b"{")
    large_run.progress.unlink()
    assert len(read_run(large_run, now_s=NOW_S).tasks) == 3000
    large_run.events.write_bytes(b"\xff\0\n{}\n")
    assert read_run(large_run, now_s=time.time() + 60).state is RunState.LOST
    shutil.rmtree(large_run.root)
    view = read_run(large_run, now_s=NOW_S)
    assert (view.run, view.name, view.state) == (large_run.run, "large", RunState.LOST)


@pytest.mark.parametrize("read", [read_run, read_summary])
def test_a_run_that_ends_while_it_is_read_is_not_lost(
    read: Callable[..., RunView], tmp_path: Path
) -> None:
    """The run may end after its events are read and before the lock is checked."""
    with program(MANY_SHORT_RUNS, tmp_path, "150") as launcher:
        while root := line_of(launcher):
            while True:
                state = read(RunPaths(Path(root)), now_s=time.time()).state
                assert state is not RunState.LOST
                if state is RunState.SUCCEEDED:
                    break


def test_importing_what_status_needs_is_instant() -> None:
    code = """
import sys, time
began_s = time.process_time()
import tfcluster.record.load_run, tfcluster.record.run_locks, tfcluster.record.logs
import tfcluster.console.screen, tfcluster.console.views.status
heavy = {"psutil", "click", "yaml", "tensorflow", "numpy", "asyncio"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
print(time.process_time() - began_s)
"""
    run = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r})" + code,
    ]
    best_s = min(
        float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    )
    assert best_s < allow_s(0.2)


def test_a_second_look_reads_only_what_is_new(
    large_run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of days has many events, and a watcher looks several times a second."""
    whole = large_run.events.read_bytes()
    large_run.events.write_bytes(whole[: len(whole) // 2])
    decoded = 0

    def counted(lines: Iterable[bytes]) -> list[events.Event]:
        nonlocal decoded
        found = decode(lines)
        decoded += len(found)
        return found

    decode = events.decode
    monkeypatch.setattr(events, "decode", counted)
    reader = RunReader(large_run)
    for _ in range(5):
        assert not reader.read(now_s=NOW_S).state.final
    large_run.events.write_bytes(whole)
    for _ in range(5):
        assert reader.read(now_s=NOW_S).state is RunState.SUCCEEDED
    assert decoded == whole.count(b"\n")
    assert reader.read(now_s=NOW_S) == read_run(large_run, now_s=NOW_S)


def test_a_new_plan_counts_for_all_events(large_run: RunPaths) -> None:
    reader = RunReader(large_run)
    assert len(reader.read(now_s=NOW_S).tasks) == 3000
    plan = {"name": "large", "backend": "ssh", "tasks": []}
    replace_json(large_run.plan, plan)
    assert reader.read(now_s=NOW_S) == read_run(large_run, now_s=NOW_S)

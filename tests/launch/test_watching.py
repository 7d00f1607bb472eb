"""Tests of stacks, attach and tensorboard, during one run and after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cluster import COMMAND, DEADLINE_S, Cluster
from tests.kit.json_formats import assert_format
from tests.kit.waiting import eventually
from tests.launch.test_stalls import LATE, started
from tfcluster.commands.tensorboard import log_folder

WRITES_EVENTS = """
import pathlib
for part in ('train', 'validation'):
    folder = pathlib.Path('logs', 'fit', part)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'events.out.tfevents.1.{tfc.rank()}').write_text('x')
"""


def test_a_run_is_watched_from_other_commands(cluster: Cluster) -> None:
    old = cluster.folder / "old"
    old.mkdir()
    stale = old / "events.out.tfevents.0.x"
    stale.touch()
    os.utime(stale, (0, 0))
    running = started(cluster, WRITES_EVENTS + LATE)
    running.wait_for("state", state="running")

    # stacks: rank 2 is in the program, the others wait for it in an exchange
    def asked(*words: str) -> dict[str, dict[str, object]]:
        said = cluster.command("stacks", "--json", *words)
        assert said.returncode == 0, said.stderr
        answer = json.loads(said.stdout)
        assert_format("stacks", answer)
        assert answer["silent"] == []
        return {task["task"]: task for task in answer["tasks"]}

    found: dict[str, dict[str, object]] = {}

    def both_wait() -> bool:
        found.update(asked())
        return bool(found["worker:0"]["waiting"] and found["worker:1"]["waiting"])

    eventually(both_wait, lambda: str(found), DEADLINE_S)
    assert "in reads_its_data" in str(found["worker:2"]["stack"])
    assert found["worker:2"]["waiting"] is None
    assert list(asked("worker:2")) == ["worker:2"]
    said = cluster.command("stacks", running.run, "worker:0").stdout
    assert said.startswith("worker:0  (waits for rank 2")
    assert "worker:1" not in said

    # attach: Ctrl-C leaves the run alone
    folder = cluster.folder
    with (folder / "seen").open("wb") as out, (folder / "told").open("wb") as err:

        def attach() -> subprocess.Popen[bytes]:
            argv = [*COMMAND, "attach", running.run]
            return subprocess.Popen(
                argv, env=cluster.environ, cwd=folder, stdout=out, stderr=err
            )

        first = attach()
        eventually(lambda: "| up" in (folder / "seen").read_text(), str, DEADLINE_S)
        first.send_signal(signal.SIGINT)
        assert first.wait(DEADLINE_S) == 130
        told = (folder / "told").read_text()
        assert f"{running.run} continues; `tfcluster stop" in told
        before = (folder / "seen").read_text().count("| up")
        second = attach()
        eventually(
            lambda: (folder / "seen").read_text().count("| up") > before,
            str,
            DEADLINE_S,
        )
        (folder / "go").touch()
        assert second.wait(DEADLINE_S) == 0
    assert running.end() == 0, running.err
    # Equal lines of ranks are shown once.
    assert "| through" in (folder / "seen").read_text()
    told = (folder / "told").read_text()
    assert "worker:2  localhost  succeeded" in told
    assert cluster.command("attach", running.run).returncode == 0

    # after the end
    over = cluster.command("stacks")
    assert over.returncode == 2
    assert "it is succeeded: there are no stacks" in over.stderr
    program = folder / "bin" / "tensorboard"
    program.parent.mkdir()
    program.write_text(f'#!{sys.executable}\nimport sys; print("args", sys.argv[1:])\n')
    program.chmod(0o755)
    path = f"{program.parent}:{cluster.environ['PATH']}"
    logs = str(folder / "logs" / "fit")
    shown = subprocess.run(
        [*COMMAND, "tensorboard", "--port", "0"],
        env={**cluster.environ, "PATH": path, "PYTHONPATH": str(Path.cwd())},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert shown.stdout.splitlines()[0] == logs, shown.stderr


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        ([], None),
        (["/a/logs"], "/a/logs"),
        (["/a/logs/train"], "/a/logs"),
        (["/a/logs/train", "/a/logs/validation"], "/a/logs"),
        (["/a/logs/1/train", "/a/logs/2/train"], "/a/logs"),
    ],
)
def test_the_log_folder(folders: list[str], found: str | None) -> None:
    assert log_folder(map(Path, folders)) == (found and Path(found))

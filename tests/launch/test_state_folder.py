"""Tests of the record's folder: deleted, inaccessible, another user's, or private."""

from __future__ import annotations

import os
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster, plain
from tests.kit.oracle import assert_nothing_left, assert_nothing_runs
from tfcluster.base.isolated_import import PACKAGE_ROOT

UP = "echo up; until [ -e meeting ]; do sleep 0.02; done; echo down"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
NOBODY = 65534


def test_a_run_survives_the_removal_of_its_record(cluster: Cluster) -> None:
    running = cluster.bash(UP, count=2).up(count=2)
    shutil.rmtree(cluster.state)
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    assert "warning: the record is incomplete" in running.err or (
        "warning: cannot write" in running.err
    )
    assert "Traceback" not in running.err
    assert running.out.splitlines().count("worker:0 | down") == 1
    assert_nothing_runs(cluster)


def test_a_failure_is_reported_without_a_record(cluster: Cluster) -> None:
    running = cluster.bash(UP + "; exit 33").up()
    shutil.rmtree(cluster.state)
    (cluster.folder / "meeting").touch()
    assert running.end() == 33
    assert "first failure: worker:0 on localhost: exited with code 3" in running.err
    assert "  | down" in running.err
    assert_nothing_runs(cluster)


def test_a_run_can_be_stopped_without_its_record(cluster: Cluster) -> None:
    running = cluster.bash(UP).up()
    shutil.rmtree(cluster.state)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert_nothing_runs(cluster)


@pytest.mark.parametrize("words", [["launch", "-n", "1", "--", "true"], ["status"]])
def test_a_state_folder_that_cannot_be_made_is_8(
    cluster: Cluster, words: list[str]
) -> None:
    (cluster.folder / "file").touch()
    cluster.environ["TFCLUSTER_STATE_DIR"] = str(cluster.folder / "file" / "state")
    done = cluster.command(*words)
    assert done.returncode == 8, done.stderr
    assert f"{cluster.folder}/file/state" in done.stderr
    assert "TFCLUSTER_STATE_DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_folder_that_others_can_read_is_refused(cluster: Cluster) -> None:
    cluster.state.mkdir()
    (cluster.state / "of-somebody").touch()
    cluster.state.chmod(0o755)
    done = cluster.command("launch", "-n", "1", "--", "true")
    assert done.returncode == 8
    assert f"chmod 700 {cluster.state}" in done.stderr


def test_everything_is_private_whatever_the_umask(cluster: Cluster) -> None:
    words = [*plain("--name", "x", count=2), "--", "bash", "-c", UP]
    running = cluster.start(*words, prepare=lambda: void(os.umask(0))).up(count=2)
    running.wait_for("state", state="running")
    assert_private(cluster.state)
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    assert_private(cluster.state)
    assert_nothing_left(running)


def void(_: object) -> None:
    """Ignore the result of a call made for its effect."""


def assert_private(folder: Path) -> None:
    found = [folder, *folder.rglob("*")]
    assert len(found) > 8
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


@pytest.fixture
def somebody() -> Iterator[Cluster]:
    """Make a cluster in another user's folder, whose parent folders are all open."""
    folder = Path(tempfile.mkdtemp(prefix="tfcluster-test-"))
    os.chown(folder, NOBODY, NOBODY)
    packages = [PACKAGE_ROOT, *site.getsitepackages()]
    yield Cluster(folder, {"HOME": str(folder), "PYTHONPATH": ":".join(packages)})
    shutil.rmtree(folder)


BECOME = (
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--",
)
# setpriv itself may still have access to files that the user it becomes cannot open, so
# start the interpreter a second time.
CAN_RUN = (
    "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import yaml'])"
)


def open_python(environ: Mapping[str, str]) -> str | None:
    """Find a Python that others can run: ours, or the system's of the same version."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with suppress(FileNotFoundError):
            argv = [*BECOME, python, "-c", CAN_RUN]
            done = subprocess.run(argv, env=environ, capture_output=True, check=False)
            if done.returncode == 0:
                return python
    return None


@as_root
def test_a_whole_launch_as_somebody_else(somebody: Cluster) -> None:
    python = open_python(somebody.environ)
    if python is None:
        pytest.skip("no Python here is open to others")
    code = (
        "import os, time; print('uid', os.getuid(), flush=True)\n"
        "if not os.fork(): os.setsid(); time.sleep(600)\n"
        "while not os.path.exists('meeting'): time.sleep(0.02)\n"
    )
    running = somebody.start(
        *(*plain(count=2), "--", python, "-S", "-c", code),
        command=(*BECOME, python, "-m", "tfcluster"),
    )
    running.up(f"uid {NOBODY}", count=2)
    assert "running as root" not in running.err
    (somebody.folder / "meeting").touch()
    assert running.end() == 0
    assert running.err.count("swept 1 leftover process") == 2
    assert_nothing_runs(somebody)

"""Where kept interpreters listen, and what they must not outlive."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tfcluster.agent.kept import places


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {"TFCLUSTER_STATE_DIR": str(tmp_path / "state")}


def test_a_socket_is_private_whatever_the_umask(environ: Mapping[str, str]) -> None:
    before = os.umask(0)
    try:
        listener, path = places.listen(environ)
    finally:
        os.umask(before)
    with listener:
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        assert Path(path).parent.parent.stat().st_mode & 0o777 == 0o700
        assert places.sockets(environ) == [path]
        places.connect(path, 1.0).close()


def test_a_folder_that_others_can_open_is_neither_used_nor_read(
    environ: Mapping[str, str],
) -> None:
    listener, path = places.listen(environ)
    with listener:
        Path(path).parent.chmod(0o755)
        assert places.sockets(environ) == []
        with pytest.raises(OSError, match="is open to other users, or not yours"):
            places.listen(environ)


def test_a_link_in_place_of_the_folder_is_not_followed(
    environ: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "warm").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is open to other users, or not yours"):
        places.listen(environ)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_a_socket_on_which_another_user_listens_is_refused(
    environ: Mapping[str, str],
) -> None:
    listener, path = places.listen(environ)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        # The kernel tells who has called listen last.
        os.setuid(65534)
        listener.listen()
        os.write(told, b"x")
        listener.accept()
        os._exit(0)
    with listener:
        os.read(ready, 1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            places.connect(path, 1.0)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(told)


def test_what_dead_interpreters_have_left_is_removed(
    environ: Mapping[str, str],
) -> None:
    listener, path = places.listen(environ)
    log = Path(places.log_of(path))
    log.touch()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        places.connect(path, 1.0)
    assert not Path(path).exists()
    assert not log.exists()


def test_what_hosts_that_were_switched_off_have_left_is_removed(
    environ: Mapping[str, str],
) -> None:
    listener, path = places.listen(environ)
    folder = Path(path).parent
    with listener, socket.socket(socket.AF_UNIX) as old:
        other = folder / "another-host-1.sock"
        old.bind(str(other))
        long_ago = time.time() - 9 * 86_400
        os.utime(other, (long_ago, long_ago))
        again, path_again = places.listen(environ)
        again.close()
        assert {str(each) for each in folder.iterdir()} == {path, path_again}


FIND_JOB = """
import os
from tfcluster.agent.kept.lifetime import job
found = job(os.environ)
print(found and found.pid)
"""


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_the_job_is_its_first_process(name: str) -> None:
    """A shell without tfcluster's variables, and two below it."""
    script = "echo $$; sh -c \"'$0' -c '$1'; true\"; true"
    argv = ["sh", "-c", script, sys.executable, FIND_JOB]
    for job, other in (({name: "7"}, None), ({}, "None")):
        done = subprocess.run(
            argv, env=job, capture_output=True, text=True, timeout=30, check=True
        )
        shell, found = done.stdout.split()
        assert found == (other or shell)

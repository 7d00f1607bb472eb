"""The agent is unpacked completely or not at all on a host that has only Python."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfcluster import __version__
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.protocol.wire import PROTOCOL, encode
from tfcluster.schedulers.agent_bundle import _packed, agent_argv, parcel

OPEN = {
    "type": "open",
    "protocol": PROTOCOL,
    "version": __version__,
    "nonce": "n",
    "run": "shipping-test",
    "lease_s": 30,
    "heartbeat_s": 5,
    "grace_s": 1,
    "witness": None,
}


def ship(home: Path, data: bytes) -> subprocess.CompletedProcess[bytes]:
    frames = encode(OPEN) + encode({"type": "close", "grace_s": 0, "others_s": 0})
    return subprocess.run(
        agent_argv((sys.executable,)),
        input=data + frames,
        env={"HOME": str(home)},
        cwd="/",
        capture_output=True,
        timeout=30,
        check=False,
    )


def test_the_agent_answers_after_the_bundle(tmp_path: Path) -> None:
    done = ship(tmp_path, parcel())
    frames = [json.loads(line) for line in done.stdout.splitlines()]
    assert frames[0]["type"] == "hello", done.stderr
    assert frames[-1]["type"] == "bye"
    home = Path(frames[0]["package"])
    assert home.parent == tmp_path / ".cache" / "tfcluster"
    assert (home / "tfcluster" / "runtime" / "task" / "bootstrap.py").is_file()


def test_nothing_but_the_cache_is_left_and_it_is_private(tmp_path: Path) -> None:
    for _ in range(2):
        assert ship(tmp_path, parcel()).returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == [".cache"]
    (home,) = (tmp_path / ".cache" / "tfcluster").iterdir()
    for path in home.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_the_patience_ends_when_all_has_arrived(tmp_path: Path) -> None:
    """A timer that was left would kill the guard, and end the run after two minutes."""
    begin = b"sys.exit(main([]))"
    tell = b"import signal; print(signal.getitimer(signal.ITIMER_REAL)); sys.exit()"
    data = parcel()
    assert data.count(begin) == 1
    done = ship(tmp_path, data.replace(begin, tell))
    assert done.stdout == b"(0.0, 0.0)\n", done.stderr


def _cached(home: Path) -> Path:
    (found,) = (home / ".cache" / "tfcluster").iterdir()
    return found


def _remove_a_module(cached: Path) -> None:
    shutil.rmtree(cached / "tfcluster" / "agent")


def _cut_a_module(cached: Path) -> None:
    path = cached / "tfcluster" / "agent" / "supervisor.py"
    path.write_bytes(path.read_bytes()[:3000])


def _cut_byte_code(cached: Path) -> None:
    (path,) = (cached / "tfcluster" / "agent" / "__pycache__").glob("supervisor.*")
    path.write_bytes(path.read_bytes()[:3000])


@pytest.mark.parametrize("damage", [_remove_a_module, _cut_a_module, _cut_byte_code])
def test_a_damaged_copy_is_mended(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    assert ship(tmp_path, parcel()).returncode == 0
    damage(_cached(tmp_path))
    done = ship(tmp_path, parcel())
    assert done.returncode == 0, done.stderr
    cached = _cached(tmp_path)  # fails if anything else is there
    source = Path(PACKAGE_ROOT) / "tfcluster" / "agent" / "supervisor.py"
    copy = cached / "tfcluster" / "agent" / "supervisor.py"
    assert copy.read_bytes() == source.read_bytes()


def test_what_killed_agents_have_left_half_unpacked_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "tfcluster"
    for name, age_s in (("tmpold", 7200), ("tmpnew", 0)):
        (folder / name / "tfcluster").mkdir(parents=True)
        os.utime(folder / name, times=(time.time() - age_s,) * 2)
    folder.chmod(0o700)
    assert ship(tmp_path, parcel()).returncode == 0
    names = {path.name for path in folder.iterdir()}
    assert "tmpold" not in names
    assert "tmpnew" in names  # another agent may be unpacking it


def test_another_agent_may_finish_between_listing_and_looking(tmp_path: Path) -> None:
    # What is listed as unpacked by another agent has its final name a moment later.
    late = (
        b"import os\n"
        b"listed = os.listdir\n"
        b"os.listdir = lambda folder: [*listed(folder), 'tmpgone']\n"
    )
    done = ship(tmp_path, late + parcel())
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("not a folder")
    done = ship(tmp_path, parcel())
    assert done.returncode == 1
    said = done.stderr.decode()
    assert f"cannot store the agent in {tmp_path}/.cache/tfcluster: Not a dir" in said
    assert "XDG_CACHE_HOME" in said


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5])
def test_a_channel_that_ends_early_ends_the_program(
    tmp_path: Path, share: float
) -> None:
    data = parcel()
    done = subprocess.run(
        agent_argv((sys.executable,)),
        input=data[: int(len(data) * share)],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode in (1, 10)
    assert not (tmp_path / ".cache").exists()


def test_a_damaged_parcel_is_refused(tmp_path: Path) -> None:
    data = bytearray(parcel())
    data[-100] ^= 1
    done = ship(tmp_path, bytes(data))
    assert b"corrupted" in done.stderr
    assert not (tmp_path / ".cache").exists()


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "tfcluster"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    done = ship(tmp_path, parcel())
    assert b"other users can write" in done.stderr


def test_the_parcel_is_the_same_for_the_same_files() -> None:
    assert _packed.__wrapped__() == parcel()


def test_the_parcel_has_all_that_its_modules_import() -> None:
    with tarfile.open(fileobj=io.BytesIO(parcel().partition(b"\0")[2])) as archive:
        sources = {
            name: archive.extractfile(name).read()  # type: ignore[union-attr] # files
            for name in archive.getnames()
        }
    modules = {module_of(name) for name in sources}
    # The package itself imports the Python API, which no agent uses, on use.
    sources.pop("tfcluster/__init__.py")
    for name, source in sources.items():
        for wanted in imported(source):
            # A name imported from a package may itself be a module.
            known = {wanted, wanted.rpartition(".")[0]} & modules
            assert known, f"{name} imports {wanted}"
    assert {"tfcluster.agent.supervisor", "tfcluster.runtime.warm.preloader"} <= modules


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_for_types(node: ast.stmt) -> bool:
    """Whether it is ``if TYPE_CHECKING:``, which no host runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(source: bytes) -> Iterator[str]:
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "tfcluster")


@pytest.mark.parametrize("character", "'\"`!$\\\n#")
def test_every_shell_passes_the_first_words_on_unharmed(character: str) -> None:
    assert all(character not in word for word in agent_argv(("python3",)))


def test_an_agent_runs_outside_of_a_command(tmp_path: Path) -> None:
    """With the first Python of the host itself that is new enough."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, code in ((old, "exit 1"), (new, f'exec {sys.executable} "$@"')):
        folder.mkdir()
        (folder / "python3").write_text(f"#!/bin/sh\n{code}\n")
        (folder / "python3").chmod(0o755)
    argv = [*agent_argv(("container", "exec", "python"))[:-1], "/no/such/python"]
    code = "import sys; print(sys.stdin.readline())\0"

    def started(folder: Path) -> subprocess.CompletedProcess[str]:
        env, given = {"PATH": str(folder)}, code + "read\n"
        return subprocess.run(
            argv, env=env, input=given, capture_output=True, text=True, check=False
        )

    assert started(new).stdout.strip() == "read"
    refused = started(old)
    assert refused.returncode == 1
    assert "no python3 of version 3.10 or newer is on the PATH" in refused.stderr

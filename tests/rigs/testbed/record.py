"""Records of the existing rigs: a folder for each, with the processes that it has.

This module also removes what a killed session has left behind. The kernel has then
ended the processes (see the lease in ``init``), so that only files can be left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.rigs.testbed.commands import RigError
from tests.rigs.testbed.namespaces import Namespaces, start_ticks

FOLDER = Path("/run/tfcluster-testbed")

PACKAGES_LOCK = FOLDER / ".packages"
"""Held while packages are installed."""

_RECORD = "rig.json"


@dataclass(frozen=True, slots=True)
class Record:
    """The creator of a rig, and process 1 of the rig and of each running host."""

    creator: Namespaces
    options: Mapping[str, int] = field(default_factory=dict)
    """The data from which ``attach`` finds the hosts again."""
    ground: Namespaces | None = None
    hosts: Mapping[str, Namespaces] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.creator.alive or (self.ground is not None and self.ground.alive)


@contextmanager
def _locked() -> Iterator[None]:
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim(name: str) -> Path:
    """Make the folder of a new rig. Raises RigError if the name is taken.

    Removes the files of dead rigs first.
    """
    if not name or "/" in name or name.startswith("."):
        raise RigError(f"{name!r} is not a name for a rig")
    with _locked():
        _sweep()
        path = FOLDER / name
        try:
            path.mkdir(mode=0o755)
        except FileExistsError:
            raise RigError(f"a rig named {name} is up already") from None
        write(path, Record(myself()))
    return path


def sweep() -> None:
    """Remove the files of dead rigs."""
    with _locked():
        _sweep()


def _sweep() -> None:
    for path in [each for each in FOLDER.iterdir() if each.is_dir()]:
        with suppress(RigError):
            found = read(path)
            if found.ground is not None and found.ground.ending:
                # Its session was killed; a stopped process keeps it from ending.
                found.ground.end(*found.hosts.values())
        if not _alive(path):
            shutil.rmtree(path)


def _alive(path: Path) -> bool:
    try:
        return read(path).alive
    except RigError:
        return False  # only partly made or taken down


def names() -> list[str]:
    """The names of all rigs that are up or starting."""
    if not FOLDER.is_dir():
        return []
    return sorted(path.name for path in FOLDER.iterdir() if _alive(path))


def read(path: Path) -> Record:
    """The record in this folder. Raises RigError if there is no such rig."""
    try:
        data = json.loads((path / _RECORD).read_text())
    except (OSError, ValueError) as error:
        raise RigError(f"no rig at {path}: {error}") from error
    ground = data["ground"]
    hosts = {name: Namespaces(**each) for name, each in data["hosts"].items()}
    creator = Namespaces(**data["creator"])
    below = Namespaces(**ground) if ground else None
    return Record(creator, data["options"], below, hosts)


def write(path: Path, record: Record) -> None:
    new = path / f"{_RECORD}.new"
    new.write_text(json.dumps(asdict(record)))
    new.replace(path / _RECORD)


def myself() -> Namespaces:
    pid = os.getpid()
    ticks = start_ticks(pid)
    if ticks is None:
        raise RigError("/proc does not show this process")
    return Namespaces(pid, ticks)

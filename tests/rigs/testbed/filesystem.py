"""Faults of one host's file system: full disks, missing files, no Python.

Each fault is a mount that only this host sees. Knows nothing of the network.
"""

from __future__ import annotations

from pathlib import Path

from tests.rigs.testbed.commands import RigError, check, run
from tests.rigs.testbed.namespaces import Where

_FILLER = ".filler"
_PROGRAMS = ("/usr/bin", "/usr/local/bin")
_LAYERS = "/run/without-python"


class Filesystem:
    """The mounts that a host has in addition to those it started with."""

    def __init__(self, where: Where, hosts_file: Path) -> None:
        self._where = where
        self._hosts_file = hosts_file
        self._hosts = hosts_file.read_text()
        self._mounted: list[str] = []

    def limit(self, folder: Path, size_bytes: int, *, mode: str = "1777") -> None:
        """Mount an empty disk of so many bytes on this folder, which is created."""
        self._check("mkdir", "-p", str(folder))
        options = f"size={size_bytes},mode={mode}"
        self._mount("tmpfs", options, str(folder))

    def hide(self, folder: Path) -> None:
        """Make the folder look empty on this host."""
        self._mount("tmpfs", "mode=0755", str(folder))

    def fill(self, folder: Path) -> None:
        """Fill the disk that ``limit`` has mounted on this folder."""
        if self._kind(folder) != "tmpfs":
            raise RigError(f"{folder} is no disk of this host's own")
        to = f"of={folder / _FILLER}"
        done = run(self._where().enter("dd", "if=/dev/zero", to, "bs=4096"))
        if "No space left" not in done.stderr:
            raise RigError(f"{folder} could not be filled: {done.stderr}")

    def drain(self, folder: Path) -> None:
        self._check("rm", "-f", str(folder / _FILLER))

    def remove_python(self) -> None:
        """Remove every Python from the PATH; those in virtual environments stay."""
        for number, folder in enumerate(_PROGRAMS):
            upper, work = (f"{_LAYERS}/{number}/{part}" for part in ("upper", "work"))
            self._check("mkdir", "-p", upper, work)
            options = f"lowerdir={folder},upperdir={upper},workdir={work}"
            self._mount("overlay", options, folder)
            names = self._check("find", folder, "-maxdepth", "1", "-name", "python*")
            self._check("rm", "-f", *names.split())

    def write_hosts_file(self, text: str) -> None:
        """Replace /etc/hosts on this host only."""
        self._hosts_file.write_text(text)

    def repair(self) -> bool:
        """Undo all of this, even while programs still use it.

        True if /etc/hosts was different: daemons may have cached the addresses.
        """
        while self._mounted:
            self._check("umount", "--lazy", self._mounted.pop())
        self._check("rm", "-rf", _LAYERS)
        renamed = self._hosts_file.read_text() != self._hosts
        self._hosts_file.write_text(self._hosts)
        return renamed

    def forget(self) -> None:
        """Forget the mounts: the host has lost its power, and its mounts with it."""
        self._mounted.clear()

    def _mount(self, kind: str, options: str, target: str) -> None:
        self._check("mount", "-t", kind, "-o", options, kind, target)
        self._mounted.append(target)

    def _kind(self, folder: Path) -> str:
        return self._check("stat", "-f", "-c", "%T", str(folder)).strip()

    def _check(self, *argv: str) -> str:
        return check(self._where().enter(*argv))

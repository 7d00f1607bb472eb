"""The mounts that define what each host sees of the file system. Pure.

Hosts share everything that is not masked here, homes included, as over NFS.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.rigs.testbed.accounts import Account
from tests.rigs.testbed.namespaces import Folder, Mask, Setup

REPOSITORY = Path(__file__).resolve().parents[3]

_PRIVATE = {"/dev/shm": "1777", "/tmp": "1777", "/var/tmp": "1777", "/run": "0755"}
"""Folders that each host has for itself, and their modes."""


def needed(rig: Path, shared: Iterable[Path]) -> tuple[Path, ...]:
    """Paths that every host must see, even below masked folders."""
    interpreter = (Path(sys.prefix), Path(sys.base_prefix))
    return _outermost((rig, REPOSITORY, *interpreter, *shared))


def _outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    every = sorted({path.resolve() for path in paths})
    return tuple(p for p in every if not any(o in p.parents for o in every))


def _mask(target: str, keep: Iterable[Path], mode: str = "0755") -> Mask:
    within = (path for path in keep if Path(target) in path.parents)
    return Mask(target, tuple(str(path) for path in within), mode)


def opened(paths: Iterable[Path]) -> tuple[Mask, ...]:
    """Masks that let every account reach these paths through closed folders."""
    every = tuple(paths)
    closed = {
        next((p for p in reversed(path.parents) if not _open(p)), None)
        for path in every
    }
    return tuple(
        _mask(str(folder), every) for folder in sorted(closed - {None}, key=str)
    )


def _open(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def host_setup(
    name: str,
    *,
    hosts_file: Path,
    keep: tuple[Path, ...],
    private_homes: Iterable[Account],
) -> Setup:
    """The setup of one host, with an empty home for each of ``private_homes``."""
    masks = tuple(_mask(path, keep, mode) for path, mode in _PRIVATE.items())
    own = tuple(private_homes)
    return Setup(
        hostname=name,
        binds=((str(hosts_file), "/etc/hosts"),),
        masks=(*masks, *(Mask(str(each.home)) for each in own)),
        folders=(
            Folder("/run/sshd"),
            *(Folder(str(each.home), 0o700, each.number) for each in own),
        ),
    )

"""What jobs of one rank without hooks have left behind, kept from run to run.

Their outcome depends on nothing but their programs and the versions of the libraries.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("tensorflow", "keras", "numpy", "scikit-learn")
KEPT = 80
"""Each theme has some, and a change of any program makes all of them anew."""


class Baselines:
    """A folder with a folder for each baseline, named by what it depends on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def locked(self, digest: str) -> Iterator[None]:
        """So that no two processes compute the same one."""
        with (self._folder / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def restore(self, digest: str, folder: Path) -> bool:
        """Copy a baseline into a folder, if there is one."""
        kept = self._folder / digest
        if not kept.is_dir():
            return False
        shutil.copytree(kept, folder, dirs_exist_ok=True, symlinks=True)
        return True

    def keep(self, digest: str, folder: Path, names: Sequence[str]) -> None:
        """Keep these files and folders of a folder; old baselines go."""
        unfinished = self._folder / f"{digest}.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for path in (folder / name for name in names):
            if path.is_dir():
                shutil.copytree(path, unfinished / path.name, symlinks=True)
            elif path.exists():
                shutil.copy2(path, unfinished)
        unfinished.rename(self._folder / digest)
        kept = [path for path in self._folder.iterdir() if path.suffix == ""]
        kept.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[KEPT:]:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


def digest_of(
    words: Sequence[str], env: dict[str, str], sources: Sequence[Path]
) -> str:
    """Of a command line without paths, its environment, and all that it may import."""
    libraries = {name: version(name) for name in LIBRARIES}
    known = [platform.python_version(), platform.machine(), libraries, words, env]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for path in sorted(sources):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]

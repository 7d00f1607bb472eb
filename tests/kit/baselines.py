"""A cache, kept between test runs, of the results of jobs of one rank without hooks.

These results depend only on the programs and on the versions of the libraries.
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
"""Number of baselines. Each theme has several; a change of any program renews all."""


class Baselines:
    """A folder with one subfolder per baseline, named by the digest of its inputs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def locked(self, digest: str) -> Iterator[None]:
        """Hold a lock, so that two processes never compute the same baseline."""
        with (self._folder / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def restore(self, digest: str, folder: Path) -> bool:
        """Copy the baseline into ``folder``. False if there is none."""
        kept = self._folder / digest
        if not kept.is_dir():
            return False
        shutil.copytree(kept, folder, dirs_exist_ok=True, symlinks=True)
        return True

    def keep(self, digest: str, folder: Path, names: Sequence[str]) -> None:
        """Store these files and folders of ``folder``, and delete old baselines."""
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
    """Digest of a command line without paths, its environment and its sources."""
    libraries = {name: version(name) for name in LIBRARIES}
    known = [platform.python_version(), platform.machine(), libraries, words, env]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for path in sorted(sources):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]

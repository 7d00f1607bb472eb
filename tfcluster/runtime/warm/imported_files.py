"""Checks whether imported packages have changed, by the packages' metadata.

Only reads the file system. Files of packages themselves are not read: installers change
the metadata whenever they change a package.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_METADATA = (".dist-info", ".egg-info")
_PATH_FILES = (".pth", ".egg-link")
_RECORDS = ("METADATA", "RECORD", "PKG-INFO", "direct_url.json")

Snapshot = Mapping[str, str]
"""Digests of the contents of places, by the places' readable names."""


def snapshot(
    folders: Iterable[str], package: str, environ: Mapping[str, str]
) -> Snapshot:
    """The state of everything in ``folders`` (``sys.path``), and of settings.

    ``package`` is the folder of tfcluster itself.
    """
    found = {f"the packages in {f}": _digest(_metadata(f)) for f in folders if f}
    found[f"tfcluster in {package}"] = _digest(_sources(package))
    found[sys.executable] = _digest(map(_stamp, _interpreter()))
    config = settings_file(environ)
    found[config] = _digest([_stamp(config)])
    return found


def changed(before: Snapshot, now: Snapshot) -> str | None:
    """The first place that has changed; None if nothing has changed."""
    return next((place for place in before if now.get(place) != before[place]), None)


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _metadata(folder: str) -> Iterator[str]:
    """One line for each package that is installed in the folder."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names suffice
    except OSError:
        yield _stamp(folder)  # a zip file, or nothing
        return
    for name in names:
        path = f"{folder}/{name}"
        if name.endswith(_PATH_FILES):
            yield _stamp(path)
        elif name.endswith(_METADATA):
            yield _stamp(path, times=False)
            for record in _RECORDS:
                yield _stamp(f"{path}/{record}")


def _interpreter() -> list[str]:
    """This interpreter, and the file that defines its virtual environment."""
    return [sys.executable, str(Path(sys.executable).parent.parent / "pyvenv.cfg")]


def _sources(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        yield from (_stamp(f"{root}/{n}") for n in sorted(files) if n.endswith(".py"))


def settings_file(environ: Mapping[str, str]) -> str:
    """The file from which Keras reads its defaults on import, or which it creates."""
    home = environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - as Keras does
    folder = environ.get("KERAS_HOME") or str(Path(home) / ".keras")
    return str(Path(folder) / "keras.json")


def _stamp(path: str, *, times: bool = True) -> str:
    with suppress(OSError):
        found = os.stat(path)  # noqa: PTH116 - there are thousands
        if not times:
            return f"{path} {found.st_ino}"
        return f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return f"{path} -"

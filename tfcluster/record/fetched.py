"""Which results of a run have come back from hosts, so that none comes twice.

For each file: what it was on its host, and what the copy here looked like right after
it had arrived. A file here that no longer looks so was changed by somebody.
"""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass
from typing import Any

from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import RunPaths

_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Copy:
    """A file that has come back; sizes in bytes, times in ns since the epoch."""

    size: int
    """Size and time of change on the host, as listed."""
    mtime_ns: int
    here_size: int
    here_mtime_ns: int
    digest: str
    """SHA-256 in hex."""


class FetchedFiles:
    """The memory of one run, by path below the workdir. For several threads."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.fetched
        self._lock = threading.Lock()
        self._copies = _parsed((read_json(self._path) or {}).get("files"))

    def get(self, path: str) -> Copy | None:
        with self._lock:
            return self._copies.get(path)

    def put(self, path: str, copy: Copy) -> None:
        with self._lock:
            self._copies[path] = copy

    def save(self) -> None:
        """Write what is known. Raises OSError."""
        with self._lock:
            files = {path: list(astuple(copy)) for path, copy in self._copies.items()}
            value = {"schema": _SCHEMA, "files": files}
            replace_json(self._path, value, durable=False)


def _parsed(found: Any) -> dict[str, Copy]:
    copies = {}
    for path, row in found.items() if isinstance(found, dict) else ():
        if isinstance(row, list) and list(map(type, row)) == [int, int, int, int, str]:
            copies[path] = Copy(*row)
    return copies

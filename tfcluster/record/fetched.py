"""Which results of a run have come back from hosts, so that none is fetched twice.

For each file: what it was on its host, and what the copy here looked like right after
it had arrived. If a file here no longer looks like that, somebody has changed it.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from tfcluster.light_dataclasses import as_dict, dataclass
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import RunPaths

_SCHEMA = 1
SAVE_S = 2.0
"""A killed process forgets the files that it fetched in this time before its end."""


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
    """The memory of one run, by path below the workdir. For several threads.

    Saved every ``save_s`` seconds: a file here that is not remembered looks as if
    somebody had changed it once it grows on its host.
    """

    def __init__(self, paths: RunPaths, save_s: float = SAVE_S) -> None:
        self._path = paths.fetched
        self._lock = threading.Lock()
        self._copies = self._saved()
        self._own: dict[str, Copy] = {}
        self._save_s = save_s
        self._saved_s = time.monotonic()

    def get(self, path: str) -> Copy | None:
        with self._lock:
            return self._copies.get(path)

    def put(self, path: str, copy: Copy) -> None:
        with self._lock:
            self._copies[path] = self._own[path] = copy
            due = time.monotonic() - self._saved_s >= self._save_s
        if due:
            # If this fails, files are compared by content next time.
            with suppress(OSError):
                self.save()

    def save(self) -> None:
        """Write what is known, including what another process has saved in the
        meantime. Raises OSError."""
        with self._lock:
            self._saved_s = time.monotonic()
            copies = {**self._saved(), **self._own}
            files = {
                path: list(as_dict(copy).values()) for path, copy in copies.items()
            }
            value = {"schema": _SCHEMA, "files": files}
            replace_json(self._path, value, durable=False)

    def _saved(self) -> dict[str, Copy]:
        return _parsed((read_json(self._path) or {}).get("files"))


def _parsed(found: Any) -> dict[str, Copy]:
    copies = {}
    for path, row in found.items() if isinstance(found, dict) else ():
        if isinstance(row, list) and list(map(type, row)) == [int, int, int, int, str]:
            copies[path] = Copy(*row)
    return copies

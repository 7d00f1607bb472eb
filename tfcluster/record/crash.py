"""Crash reports: a bug in tfcluster leaves a file with the traceback."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from tfcluster import __version__
from tfcluster.base.errors import ResourceError, TfclusterError
from tfcluster.record.files import open_private, write_all
from tfcluster.record.paths import state_dir

_KEPT = 10
"""How many crash files are kept."""


def save_crash(error: BaseException, environ: Mapping[str, str]) -> Path | None:
    """Write a crash file, remove old ones; returns its path, or None if that failed."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    head = f"tfcluster {__version__}, Python {platform.python_version()}\n"
    text = head + "".join(traceback.format_exception(error))
    try:
        path = state_dir(environ) / f"crash-{stamp}-{os.getpid()}.txt"
        descriptor = open_private(path, os.O_WRONLY)
        try:
            write_all(descriptor, text.encode(errors="backslashreplace"))
        finally:
            os.close(descriptor)
        # A repeated crash must not fill the disk. Names sort by time.
        for old in sorted(path.parent.glob("crash-*.txt"))[:-_KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, TfclusterError):
        return None
    return path


def crashed(error: Exception, environ: Mapping[str, str]) -> ResourceError:
    """A bug in tfcluster: the traceback goes to a file, the user sees one line."""
    where = save_crash(error, environ)
    kept = f"; please report it with {where}" if where else ""
    return ResourceError(
        f"internal error in tfcluster: {type(error).__name__}: {error}{kept}"
    )

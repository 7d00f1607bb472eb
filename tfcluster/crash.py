"""What is kept of a fault of tfcluster's own: a file with the traceback."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from tfcluster import __version__
from tfcluster.errors import TfclusterError
from tfcluster.record.files import open_private, write_all
from tfcluster.record.paths import state_dir

_KEPT = 10
"""How many such files stay."""


def save_crash(error: BaseException, environ: Mapping[str, str]) -> Path | None:
    """Write it to the state folder; None where even that cannot be done.

    The newest few of such files stay there.
    """
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
        _remove_old(path.parent)
    except (OSError, TfclusterError):
        return None
    return path


def _remove_old(folder: Path) -> None:
    """Their names sort by time; a fault that comes again and again fills no disk."""
    for old in sorted(folder.glob("crash-*.txt"))[:-_KEPT]:
        old.unlink(missing_ok=True)

"""Makes a program that has ended exit with status 1 if a final check fails."""

from __future__ import annotations

import atexit
import os
import sys

from tfcluster.runtime.telemetry.agent_channel import reporter

_failed = False
_installed = False


def install() -> None:
    """Register the exit handler, before the handlers that may call ``fail``.

    Python runs exit handlers in reverse order, so ours runs after those handlers.
    """
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_exit)


def fail(text: str) -> None:
    """Print and report ``text``; the process will exit with status 1."""
    global _failed
    _failed = True
    sys.stderr.write(f"tfcluster: error: {text}\n")
    reporter().failure(text)
    reporter().flush()


def _exit() -> None:
    if not _failed:
        return
    # An exception or sys.exit in an exit handler would not change the exit status.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

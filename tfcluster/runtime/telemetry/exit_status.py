"""Have a program fail that has come to its end, because of what has shown only then."""

from __future__ import annotations

import atexit
import os
import sys

from tfcluster.runtime.telemetry.agent_channel import reporter

_failed = False
_installed = False


def install() -> None:
    """Called before whoever may call ``fail`` registers what it does at exit.

    Python does the last first: so this comes after that.
    """
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_exit)


def fail(text: str) -> None:
    """Say ``text``; the process then ends with 1."""
    global _failed
    _failed = True
    sys.stderr.write(f"tfcluster: error: {text}\n")
    reporter().failure(text)
    reporter().flush()


def _exit() -> None:
    if not _failed:
        return
    # What is raised here, or passed to sys.exit, does not change the exit status.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

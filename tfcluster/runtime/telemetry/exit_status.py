"""How a program ends: with status 1 if a final check fails, and why it ended."""

from __future__ import annotations

import atexit
import os
import sys
import traceback

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


_SLOW_IMPORTS = ("tensorflow", "keras")
_MAX_LENGTH = 500


def cause(error: BaseException) -> str | None:
    """The last line of the traceback, or the message that was given to ``sys.exit``.

    None if the exit code says everything. A failed import of TensorFlow or Keras is
    named, because its error often only mentions some inner module or library.
    """
    if isinstance(error, SystemExit):
        return _first_line(error.code) if isinstance(error.code, str) else None
    if isinstance(error, KeyboardInterrupt):
        return None
    lines = traceback.format_exception_only(type(error), error)
    # A SyntaxError begins with an indented excerpt; notes follow the message.
    line = _first_line(next(line for line in lines if not line.startswith(" ")))
    name = _failed_import(error)
    return f"import {name}: {line}" if name else line


def _failed_import(error: BaseException) -> str | None:
    """The library that was being imported when ``error`` was raised, or None."""
    if isinstance(error, ModuleNotFoundError) and error.name in _SLOW_IMPORTS:
        return error.name
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and name in _SLOW_IMPORTS:
            return name
    return None


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} ..."

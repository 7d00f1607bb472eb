"""Says in one sentence why a program ended, from its uncaught exception. Pure."""

from __future__ import annotations

import traceback

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

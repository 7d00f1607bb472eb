"""What a command prints for its caller: standard output, where it can be written to.

Talk goes to standard error and may get lost; data may not, or nobody would know.
"""

from __future__ import annotations

import contextlib
import os
import sys

from tfcluster.errors import ResourceError


class OutputClosedError(Exception):
    """Whoever read our output has seen enough; nothing more can be said there."""


def put(text: str) -> None:
    """Write data and see it off.

    Raises OutputClosedError where the reader has gone, and ResourceError where the
    text cannot be written.
    """
    if sys.stdout is None:
        raise ResourceError("cannot write the answer: standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        _discard()
        raise OutputClosedError from error
    except OSError as error:
        _discard()
        raise ResourceError(
            f"cannot write the answer to standard output: {error.strerror}"
        ) from error


def say(line: str) -> None:
    """Talk; lost where standard error is closed or full."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")


def escape_unknown() -> None:
    """Let characters that the terminal's encoding lacks become escapes, not errors."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard() -> None:
    """What is still in the buffer is not to fail again at the end of Python."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)

"""Output of a command: data on stdout, messages on stderr.

A message may get lost; if data cannot be written, that is an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from tfcluster.base.errors import ResourceError

if TYPE_CHECKING:  # `--help` must not wait for dataclasses
    from tfcluster.console.display import Display


class OutputClosedError(Exception):
    """The reader has closed our output, as ``| head`` does."""


def put(text: str) -> None:
    """Write data and flush it. Raises OutputClosedError or ResourceError."""
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
    """Write a message; it is lost if stderr is closed or full."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")


def say_progress(line: str, display: Display) -> None:
    """Write a message about progress, unless the user asked for quiet."""
    if not display.quiet:
        say(display.stamp(time.time()) + line)


def escape_unknown() -> None:
    """Escape characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard() -> None:
    """Redirect stdout to /dev/null, so that flushing it at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)

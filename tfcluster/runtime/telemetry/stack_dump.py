"""The Python stack traces of all threads, as text."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

RUNNER = "tfcluster.runtime.scripts.run_script"
"""The module that runs the user's program: its frames and outer frames are omitted."""

OURS = "tfcluster-"
"""Prefix of the names of the runtime's own threads, which are never shown."""
_OUR_LISTENER = "tfcluster.runtime.telemetry.agent_channel"
"""Its thread has no name, because it is not a threading.Thread."""
_OUR_ROOT = str(Path(__file__).resolve().parents[1]) + os.sep
_PYTHONS_OWN = str(Path(os.__file__).parent) + os.sep


def stacks_text(without_thread: int) -> str:
    """The stacks of all threads except ``without_thread``; the main thread is first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)} (most recent call last):\n{_text(frame)}"
        for ident, frame in frames
        if ident != without_thread
        and not names.get(ident, "").startswith(OURS)
        and _outermost(frame).f_globals.get("__name__") != _OUR_LISTENER
    )


def program_line() -> str:
    """The main thread's innermost line in the user's own code: ``train.py:30``.

    Libraries and the standard library are skipped. Empty if there is no such line.
    """
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    for call in _program_frames(frame):
        path = call.f_code.co_filename
        if not path.startswith("<") and not _is_library(path):
            return f"{path}:{call.f_lineno}"
    return ""


def _is_library(path: str) -> bool:
    parts = Path(path).parts
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or path.startswith((_OUR_ROOT, _PYTHONS_OWN))
    )


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _text(frame: FrameType) -> str:
    calls = list(_program_frames(frame))
    calls.reverse()
    return "".join(
        traceback.StackSummary.extract((call, call.f_lineno) for call in calls).format()
    )


def _program_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's program, innermost first, up to ``RUNNER``."""
    while frame is not None and frame.f_globals.get("__name__") != RUNNER:
        yield frame
        frame = frame.f_back

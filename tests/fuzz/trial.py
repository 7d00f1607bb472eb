"""Runs one input of a target, and tells what is wrong with the outcome.

A defect is an error that the parser does not document, more than ``MOST_S`` seconds of
processor time, or more than ``MOST_BYTES`` of memory.
"""

from __future__ import annotations

import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.target import Target

MOST_S = 1.0
"""Processor time."""
_ENDED_S = 20.0
MOST_BYTES = 100_000_000
_ROOM_BYTES = 2 << 30
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PACKAGES = ("/tfcluster/", "/tests/fuzz/targets/")


@dataclass(frozen=True)
class Defect:
    """What is wrong; ``place`` tells equal defects from different ones."""

    kind: str
    place: str
    text: str


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """Processor time."""
    peak_bytes: int
    """By how much the memory in use grew at most; 0 if it cannot be told."""
    refused: bool
    """The parser raised an error that it documents."""
    defect: Defect | None = None


class _TooSlow(BaseException):
    """Not an Exception: no parser may catch it."""


def attempt(target: Target, data: bytes) -> Outcome:
    """Run one input; in the main thread, so that it can be ended."""
    before = _reset_peak()
    begin = time.process_time()
    refused, defect = False, None
    try:
        with _limited():
            target.run(data)
    except target.errors:
        refused = True
    except _TooSlow as error:
        place = _place(error)
        defect = Defect("slow", place, f"over {_ENDED_S:g} s at {place}")
    except Exception as error:
        defect = _crash(error)
    seconds = time.process_time() - begin
    peak = max(0, _peak_bytes() - before)
    if defect is None and peak > MOST_BYTES:
        defect = Defect("memory", target.name, f"{peak / 1e6:.0f} MB")
    if defect is None and seconds > MOST_S:
        defect = Defect("slow", target.name, f"{seconds:.1f} s")
    return Outcome(seconds, peak, refused, defect)


@contextmanager
def _limited() -> Iterator[None]:
    """End what takes far too long, and fail before the machine lacks memory."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, expire)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _ROOM_BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, _ENDED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _crash(error: Exception) -> Defect:
    place = _place(error)
    said = str(error)[:200]
    text = f"{type(error).__name__}: {said!r} at {place}"
    return Defect(type(error).__name__, place, text)


def _place(error: BaseException) -> str:
    """The innermost line of ours that was being executed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if any(name in f.filename for name in _PACKAGES)]
    if not ours:
        return "?"
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} ({ours[-1].name})"


def _reset_peak() -> int:
    """Forget the highest memory use; returns the bytes in use now."""
    try:
        _CLEAR.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return 1 << 62
    return _peak_bytes()


def _peak_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0

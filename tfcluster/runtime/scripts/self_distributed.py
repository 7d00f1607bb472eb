"""Whether the program distributes its training by itself, as scripts for Horovod do.

Such a program shards its data, exchanges its gradients and lets rank 0 write files, so
the runtime does none of that for it. This is known from the program's source before its
first line runs, or else from its first call. Knows neither TensorFlow nor Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tfcluster.runtime.scripts.analysis import distributes_itself
from tfcluster.runtime.scripts.run_script import Program

_claimed = False
_may_claim: Callable[[], None] = lambda: None  # noqa: E731  # a default, not a function


def claimed() -> bool:
    """Whether the program distributes its training by itself."""
    return _claimed


def claim() -> None:
    """Record that the program does. Raises what the check of ``guard`` raises."""
    global _claimed
    if not _claimed:
        _may_claim()
        _claimed = True


def guard(check: Callable[[], None]) -> None:
    """Have ``check`` called before the first claim; it raises if that is too late."""
    global _may_claim
    _may_claim = check


def read(program: Program) -> None:
    """Claim if the program's main file says so."""
    if source := source_of(program):
        claim_by(source)


def claim_by(source: str) -> None:
    """Claim if ``source`` distributes its training by itself."""
    if distributes_itself(source):
        claim()


def source_of(program: Program) -> str | None:
    """The source of a program's main file; None for ``-m``, or if it is unreadable."""
    if program.option == "-c":
        return program.target
    if program.option:
        return None
    try:
        return Path(program.target).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None

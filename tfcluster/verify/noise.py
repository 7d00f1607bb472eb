"""Which differences between runs are no differences: noise and tolerance. Pure.

The noise is what one process differs from itself by, in each value and after each step:
the program runs alone twice, the second time with other threads, and with gradients
moved by about their rounding errors. It says nothing about the first loss, or values
that both runs round equally, whose last bits other sums change: hence the tolerance.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from tfcluster.verify.recorded import Recorded

VARIABLE = "TF_DETERMINISTIC_OPS"
_THREADS = "TF_NUM_INTRAOP_THREADS"


def deterministic_variables(
    gpus: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables for deterministic operations, if there are GPUs and none is set."""
    return {VARIABLE: "1"} if gpus and VARIABLE not in environ else {}


def is_nondeterministic(reason: str, tail: Sequence[str]) -> bool:
    """Whether a program failed because an operation has no deterministic form."""
    return "determinis" in "\n".join([reason, *tail]).lower()


def other_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that gives TensorFlow's operations another number of threads."""
    count = environ.get(_THREADS, "") or str(len(os.sched_getaffinity(0)))
    return {_THREADS: "2" if count == "1" else "1"}


MARGIN = 8.0
"""How many times the measured difference counts as noise.

Two runs are only one sample, and ranks round at other places.
"""


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise by value; below ``floor`` nothing counts as a difference."""

    floor: float
    measured: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)
    """By value, the steps after which its largest difference so far has grown."""

    def add(self, value: Hashable, step: int, difference: float) -> None:
        """Note a difference of the two runs; steps come in order."""
        grown = self.measured.setdefault(value, [])
        if difference > (grown[-1][1] if grown else 0.0):
            grown.append((step, difference))

    def of(self, value: Hashable, step: int) -> float:
        """The largest difference of ``value`` that counts as equal after ``step``."""
        grown = self.measured.get(value, [])
        place = bisect_right(grown, step, key=lambda growth: growth[0])
        return max(self.floor, MARGIN * grown[place - 1][1] if place else 0.0)


ON_CPUS = 1e-5
"""The tolerance that docs/equality.md uses."""
ON_GPUS = 1e-4
_FLOAT32, _TF32 = 2.0**-24, 2.0**-11
"""The rounding error of one number, relative to its size."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative difference that always counts as equal, and the reason."""

    value: float
    why: str
    chosen: bool = False
    """Whether the user chose it: then the noise of one process does not count."""


def tolerance(chosen: float | None, alone: Recorded, ranks: Recorded) -> Tolerance:
    """The tolerance for these runs, unless the user has ``chosen`` one."""
    if chosen is not None:
        return Tolerance(chosen, "as given with --tolerance", chosen=True)
    unit = max(alone.unit, ranks.unit)
    if any(run.gpus and run.tf32 for run in (alone, ranks)):
        unit = max(unit, _TF32)
    if unit > _FLOAT32:
        return Tolerance(2 * unit, "twice the rounding error of the coarsest numbers")
    if max(alone.gpus, ranks.gpus) > 0:
        return Tolerance(
            ON_GPUS,
            "TensorFlow sees a GPU: smaller batches may get other kernels, and atomic "
            "additions have no fixed order",
        )
    return Tolerance(ON_CPUS, "for float32 on CPUs, in another order of sums")

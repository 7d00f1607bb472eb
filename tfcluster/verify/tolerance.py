"""Below which size no difference counts, whatever the noise. Pure.

The noise of one process says nothing about its first loss, or about a value that the
two runs round equally. Sums in another order change the last bits of these, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfcluster.verify.recorded import Recorded

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
    given: bool = False
    """Whether the user gave it: then the noise of one process does not count."""


def tolerance(given: float | None, alone: Recorded, ranks: Recorded) -> Tolerance:
    """The tolerance for these runs; ``given`` takes precedence."""
    if given is not None:
        return Tolerance(given, "as given with --tolerance", given=True)
    unit = max(alone.unit, ranks.unit)
    if any(run.devices.gpus and run.devices.tf32 for run in (alone, ranks)):
        unit = max(unit, _TF32)
    if unit > _FLOAT32:
        return Tolerance(2 * unit, "twice the rounding error of the coarsest numbers")
    if max(alone.devices.gpus, ranks.devices.gpus) > 0:
        return Tolerance(
            ON_GPUS,
            "TensorFlow sees a GPU: smaller batches may get other kernels, and atomic "
            "additions have no fixed order",
        )
    return Tolerance(ON_CPUS, "for float32 on CPUs, in another order of sums")

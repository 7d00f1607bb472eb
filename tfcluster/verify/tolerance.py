"""How large a difference may be. Pure.

On CPUs, the ranks differ from one process only in the order of float32 sums. GPUs add
more: other kernels for smaller batches, atomic additions in any order, and TF32, whose
factors have 11 significant bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfcluster.verify.recorded import Devices

ON_CPUS = 1e-5
"""The tolerance that docs/equality.md uses."""
ON_GPUS = 1e-4
WITH_TF32 = 1e-3
"""Twice the rounding error of one factor, 2**-11."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative difference that counts as equal, and the reason for it."""

    value: float
    why: str


def tolerance(given: float | None, alone: Devices, ranks: Devices) -> Tolerance:
    """The tolerance for runs on these devices; ``given`` takes precedence."""
    if given is not None:
        return Tolerance(given, "as given with --tolerance")
    if alone.gpus == ranks.gpus == 0:
        return Tolerance(ON_CPUS, "for float32 on CPUs, in another order of sums")
    if not (alone.tf32 or ranks.tf32):
        return Tolerance(
            ON_GPUS,
            "TensorFlow sees a GPU: smaller batches may get other kernels, and atomic "
            "additions have no fixed order",
        )
    return Tolerance(
        WITH_TF32,
        "TensorFlow sees a GPU and may round the factors of products to TF32, 11 "
        "significant bits (tf.config.experimental.enable_tensor_float_32_execution("
        f"False) makes it {ON_GPUS:.0e})",
    )

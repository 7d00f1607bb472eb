"""DistributedGradientTape."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import tensorflow as tf

from tfcluster.runtime.api.ops import unconverted
from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.compression import Compressor
from tfcluster.runtime.distributed.settings import Settings, settings


@unconverted
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | None = None,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """A tape like ``gradtape``, whose ``gradient`` combines the ranks' gradients.

    It can be entered, or made of a tape that has recorded already; ``gradtape`` itself
    stays as it is. The arguments are those of ``DistributedOptimizer``, and so are the
    errors that they raise. Sources without a gradient (None) are left out, on all ranks
    or none.
    """
    del device_dense, device_sparse, num_groups, groups
    chosen = settings(
        "DistributedGradientTape",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
    )
    tape = copy.copy(gradtape)
    tape.gradient = MethodType(_gradient_by(chosen), tape)
    return tape


def _gradient_by(chosen: Settings) -> Any:
    @unconverted
    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """``tf.GradientTape.gradient``, combined over the ranks."""
        local = type(self).gradient(
            self, target, sources, output_gradients, unconnected_gradients
        )
        combined = chosen.exchanged(tf.nest.flatten(local), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(local, combined)

    return gradient

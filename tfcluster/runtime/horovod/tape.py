"""DistributedGradientTape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.exchange.wire_format import Compressor
from tfcluster.runtime.horovod.settings import Settings, Source, settings, weights_of
from tfcluster.runtime.keras.types import Layer
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import Nest


@unconverted
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | None = None,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """A copy of ``gradtape`` whose ``gradient`` combines the ranks' gradients.

    ``gradtape`` may or may not have recorded already, and is not changed. The arguments
    and their errors are as for ``DistributedOptimizer``. ``gradient`` has
    TensorFlow's arguments; its results have the shapes and dtypes of the sources, and
    it raises what ``allreduce`` raises. A source without a gradient (None) is skipped,
    and must have none on any rank. Sources passed to ``register_local_source`` are not
    exchanged. ``gradient(..., use_generic_names=True)`` compares sources by position,
    not by name. ``get_local_and_global_gradients`` has the arguments of ``gradient``;
    it returns two lists of (source, gradient): those not exchanged, and the others.
    Follows ``DistributedGradientTape`` of horovod/tensorflow/__init__.py.
    """
    del device_dense, device_sparse, num_groups, groups
    chosen = settings(
        "DistributedGradientTape",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    tape = copy.copy(gradtape)
    gradient = MethodType(_gradient_by(chosen), tape)
    divided = MethodType(_divided_by(chosen), tape)
    tf_patches.TABLE.replace(tf_patches.ONE_TAPE_GRADIENT, tape, gradient)
    tf_patches.TABLE.replace(tf_patches.ONE_TAPE_LOCAL, tape, chosen.local.add)
    tf_patches.TABLE.replace(tf_patches.ONE_TAPE_DIVIDED, tape, divided)
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    *args: Any,
    local_layers: Layer | list[Layer] | tuple[Layer, ...] | None = None,
    **settings: Any,
) -> tf.GradientTape:
    """A ``DistributedGradientTape`` except for the layers that each rank trains alone.

    ``local_layers`` is a layer or a list of layers, which must be built. The other
    arguments are as for ``DistributedGradientTape``. Raises ValueError if a layer is
    not built, and what ``DistributedGradientTape`` raises. Follows
    ``PartialDistributedGradientTape`` of horovod/tensorflow/__init__.py.
    """
    tape = DistributedGradientTape(gradtape, *args, **settings)
    for variable in weights_of(local_layers):
        tape.register_local_source(variable)
    return tape


def _gradient_by(chosen: Settings) -> Callable[..., Nest]:
    @unconverted
    def gradient(
        self: tf.GradientTape,
        target: Nest,
        sources: Nest,
        output_gradients: Nest = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Nest:
        """Call ``tf.GradientTape.gradient``; combine the result over the ranks."""
        local = type(self).gradient(
            self, target, sources, output_gradients, unconnected_gradients
        )
        combined = chosen.exchanged(
            tf.nest.flatten(local),
            tf.nest.flatten(sources),
            by_position=use_generic_names,
        )
        return tf.nest.pack_sequence_as(local, combined)

    return gradient


def _divided_by(chosen: Settings) -> Callable[..., tuple[list[Any], list[Any]]]:
    @unconverted
    def divided(
        self: tf.GradientTape,
        target: Nest,
        sources: Sequence[Source],
        *args: Any,
        **kw: Any,
    ) -> tuple[list[Any], list[Any]]:
        """Call this tape's ``gradient`` and pair the results with their sources."""
        pairs = zip(sources, self.gradient(target, sources, *args, **kw), strict=True)
        local: list[Any] = []
        common: list[Any] = []
        for source, gradient in pairs:
            (local if chosen.local.has(source) else common).append((source, gradient))
        return local, common

    return divided

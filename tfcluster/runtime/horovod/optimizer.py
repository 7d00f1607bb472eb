"""DistributedOptimizer, for optimizers of Keras 3 and of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.compression import Compressor
from tfcluster.runtime.horovod.local_sources import weights_of
from tfcluster.runtime.horovod.settings import settings
from tfcluster.runtime.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | None = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that combines the ranks' gradients before it applies them.

    A Keras optimizer is returned itself, of its own class and with its own config, so
    that models are saved and loaded as without it; what is loaded is not distributed.
    A ``tf.compat.v1`` optimizer is wrapped: ``compute_gradients`` returns the combined
    gradients, all else is the wrapped one's. ``name`` is "Distributed" and its type if
    not given; ``use_locking`` is for the latter kind.

    Gradients are averaged, or summed up with ``op=Sum``, all in one exchange; each rank
    counts the same. Variables without gradient are left out, on all ranks or none.
    ``compression`` is that of the run's configuration if not given. ``sparse_as_dense``
    makes tensors of IndexedSlices. With ``backward_passes_per_step`` of n, gradients of
    n calls are summed up on each rank (or averaged: ``average_aggregated_gradients``)
    and every n-th call exchanges and applies them. ``gradient_predivide_factor`` f
    multiplies by 1/f before summing up and by f/size afterwards. Variables that
    ``register_local_var`` of the result is given are not exchanged; their gradients are
    divided by the number of ranks unless ``scale_local_gradients`` is false. Devices
    and groups are ignored: all gradients are exchanged at once, on the host.

    Raises TypeError for other optimizers, ValueError for settings that make no sense.
    """
    del device_dense, device_sparse, num_groups, groups
    label = name or f"Distributed{type(optimizer).__name__}"
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not is_v1:
        _require_keras(optimizer)
    if is_v1 and backward_passes_per_step > 1:
        raise ValueError("backward_passes_per_step is for Keras optimizers only")
    if is_v1 and op is ReduceOp.ADASUM:
        raise ValueError(
            "Adasum of updates, which Horovod offers for TensorFlow 1 optimizers, is "
            "not available: combine gradients instead, with a Keras optimizer or "
            "DistributedGradientTape with op=Adasum"
        )
    chosen = settings(
        label,
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if is_v1:
        from tfcluster.runtime.horovod.tf1_optimizer import V1Optimizer

        return V1Optimizer(optimizer, chosen, use_locking=use_locking)
    from tfcluster.runtime.horovod.keras_optimizer import distribute

    return distribute(optimizer, chosen)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    local_layers: Any = None,
    **settings: Any,
) -> Any:
    """A ``DistributedOptimizer`` without the layers that each rank trains alone.

    ``local_layers`` is a layer or a list of layers, whose weights are there already;
    other arguments are those of ``DistributedOptimizer``.
    """
    local = weights_of(local_layers)
    found = DistributedOptimizer(optimizer, name, **settings)
    for variable in local:
        found.register_local_var(variable)
    return found


def _require_keras(optimizer: Any) -> None:
    # Only now: programs of TensorFlow 1 need no Keras.
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is neither a Keras 3 optimizer nor one of "
            "tf.compat.v1.train"
        )

"""DistributedOptimizer for optimizers of Keras 3 and of TensorFlow 1.

``load_model`` loads a Keras model and distributes its optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import keras
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.wire_format import Compressor
from tfcluster.runtime.horovod.settings import settings, weights_of
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import Layer, Model, Optimizer
from tfcluster.runtime.process_sets import ProcessSet, global_process_set

AnOptimizer = TypeVar("AnOptimizer")
"""An optimizer of Keras 3 or of TensorFlow 1."""


def DistributedOptimizer(
    optimizer: AnOptimizer,
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
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> AnOptimizer:
    """Return an optimizer that combines the ranks' gradients before it applies them.

    A Keras optimizer is modified and returned; its class and config stay, so that
    models are saved and loaded as usual. A loaded optimizer is not distributed. A
    ``tf.compat.v1`` optimizer is wrapped: ``compute_gradients`` returns the combined
    gradients, and everything else is delegated. ``name`` defaults to "Distributed" and
    the optimizer's type; ``use_locking`` is for TensorFlow 1 optimizers.

    Gradients, of the dtypes of ``allreduce``, are averaged, or summed with ``op=Sum``,
    all in one exchange; all ranks have equal weight. Shapes, dtypes and kinds (tensor,
    IndexedSlices, None) must be the same on all ranks; a variable without a gradient is
    skipped. ``compression`` defaults to the setting in the run's configuration.
    ``sparse_as_dense`` converts IndexedSlices to tensors. With
    ``backward_passes_per_step`` of n, the gradients of n calls are summed on each rank
    (or averaged: ``average_aggregated_gradients``), and every n-th call exchanges and
    applies them. ``gradient_predivide_factor`` f multiplies by 1/f before the sum and
    by f/size after it. Variables passed to the result's ``register_local_var`` are not
    exchanged; their gradients are divided by the number of ranks unless
    ``scale_local_gradients`` is false. Devices and groups are ignored: all gradients
    are exchanged at once, on the host.

    Raises TypeError for other optimizers; ValueError for an ``op`` other than Average,
    Sum and Adasum, for a predivide factor that is not positive or not with Average, for
    fewer than one pass, and for several passes or Adasum of a TensorFlow 1 optimizer;
    CollectiveError if tfcluster has already divided batches of this program. The
    result's ``apply`` raises what ``allreduce`` raises, and ValueError if a variable
    has a gradient in some of n passes only.

    Follows ``DistributedOptimizer`` of horovod/tensorflow/__init__.py and
    horovod/_keras/__init__.py.
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
        from tfcluster.runtime.horovod.tf1_optimizer import HorovodV1Optimizer

        wrapper = HorovodV1Optimizer(
            cast(Any, optimizer), chosen, use_locking=use_locking
        )
        return cast(AnOptimizer, wrapper)
    from tfcluster.runtime.horovod.keras_optimizer import distribute

    return cast(AnOptimizer, distribute(cast(Optimizer, optimizer), chosen))


def PartialDistributedOptimizer(
    optimizer: AnOptimizer,
    name: str | None = None,
    *,
    local_layers: Layer | list[Layer] | tuple[Layer, ...] | None = None,
    **settings: Any,
) -> AnOptimizer:
    """A ``DistributedOptimizer`` except for the layers that each rank trains alone.

    ``local_layers`` is a layer or a list of layers, which must be built. The other
    arguments are as for ``DistributedOptimizer``. Raises ValueError if a layer is not
    built, and what ``DistributedOptimizer`` raises. Follows
    ``PartialDistributedOptimizer`` of horovod/tensorflow/keras/__init__.py.
    """
    local = weights_of(local_layers)
    distributed: Any = DistributedOptimizer(optimizer, name, **settings)
    for variable in local:
        distributed.register_local_var(variable)
    return cast(AnOptimizer, distributed)


def _require_keras(optimizer: object) -> None:
    # Imported here because TensorFlow 1 programs do not need Keras.
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is neither a Keras 3 optimizer nor one of "
            "tf.compat.v1.train"
        )


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: Compressor | None = None,
    **loading: Any,
) -> Model:
    """Like ``keras.models.load_model``, but makes the optimizer a distributed one.

    ``custom_optimizers`` are the program's own optimizer classes, ``compression`` is
    passed to ``DistributedOptimizer``, and ``loading`` has further arguments of Keras's
    function. A distributed optimizer was saved under its original class. Raises what
    Keras's function raises, and CollectiveError like ``DistributedOptimizer``. Follows
    ``load_model`` of horovod/_keras/__init__.py.
    """
    by_name: dict[str, object] = {
        kind.__name__: kind for kind in custom_optimizers or ()
    }
    by_name |= custom_objects or {}
    model: Model = keras.models.load_model(filepath, custom_objects=by_name, **loading)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        # A LossScaleOptimizer thus checks for infinities after the exchange.
        DistributedOptimizer(optimizer, compression=compression)
        without_xla(model)
    return model

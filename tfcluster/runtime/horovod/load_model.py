"""Load a Keras model whose optimizer is to be distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfcluster.runtime.exchange.compression import Compressor
from tfcluster.runtime.horovod.optimizer import DistributedOptimizer
from tfcluster.runtime.keras import patches


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor | None = None,
    **loading: Any,
) -> Any:
    """``keras.models.load_model``, with the optimizer made distributed.

    ``custom_optimizers`` are classes of the program's own. What was saved with a
    distributed optimizer has the optimizer's own class.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known |= custom_objects or {}
    model = keras.models.load_model(filepath, custom_objects=known, **loading)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        # An optimizer that scales losses looks for infinities after the exchange.
        DistributedOptimizer(optimizer, compression=compression)
        patches.TABLE.replace(patches.ONE_MODEL_TRAIN_FUNCTION, model, None)
        if model.jit_compile:
            model.jit_compile = False
    return model

"""Load a Keras model and distribute its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfcluster.runtime.exchange.compression import Compressor
from tfcluster.runtime.horovod.optimizer import DistributedOptimizer
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.train.xla_fallback import without_xla


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor | None = None,
    **loading: Any,
) -> Any:
    """``keras.models.load_model`` that makes the optimizer a distributed one.

    ``custom_optimizers`` are the program's own optimizer classes. A distributed
    optimizer was saved under its original class.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known |= custom_objects or {}
    model = keras.models.load_model(filepath, custom_objects=known, **loading)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        # A LossScaleOptimizer thus checks for infinities after the exchange.
        DistributedOptimizer(optimizer, compression=compression)
        patches.TABLE.replace(patches.ONE_MODEL_TRAIN_FUNCTION, model, None)
        without_xla(model)
    return model

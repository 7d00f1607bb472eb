"""Loads a Keras model and distributes its optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfcluster.runtime.exchange.wire_format import Compressor
from tfcluster.runtime.horovod.optimizer import DistributedOptimizer
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import Model


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
    known: dict[str, object] = {kind.__name__: kind for kind in custom_optimizers or ()}
    known |= custom_objects or {}
    model: Model = keras.models.load_model(filepath, custom_objects=known, **loading)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        # A LossScaleOptimizer thus checks for infinities after the exchange.
        DistributedOptimizer(optimizer, compression=compression)
        without_xla(model)
    return model

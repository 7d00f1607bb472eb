"""The models of ``benchmarks.partition``, each with a batch; no tfcluster in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

Batch = tuple[Any, Any]


def build(name: str, *, xla: bool = False) -> tuple[Any, Batch]:
    """The compiled model of this name in ``MODELS``, and a batch for it.

    With ``xla``, XLA compiles its steps.
    """
    keras.utils.set_random_seed(1)
    model, x, classes = MODELS[name](np.random.default_rng(0))
    y = np.random.default_rng(1).integers(0, classes, len(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01)
    if name.endswith("Adam"):
        optimizer = keras.optimizers.Adam(1e-4)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=xla)
    return model, (x, y)


def _mlp(rng: np.random.Generator) -> tuple[Any, Any, int]:
    layers = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    return model, rng.normal(size=(64, 784)).astype("float32"), 10


def _cnn(filters: list[tuple[int, int]]) -> Callable[[np.random.Generator], Any]:
    """Makes a CNN of convolutions with these filters and strides, normalised."""

    def made(rng: np.random.Generator) -> tuple[Any, Any, int]:
        layers: list[Any] = []
        for count, stride in filters:
            layers += [
                keras.layers.Conv2D(count, 3, stride, "same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((32, 32, 3)), *layers])
        return model, rng.normal(size=(64, 32, 32, 3)).astype("float32"), 10

    return made


def _lstm(rng: np.random.Generator) -> tuple[Any, Any, int]:
    layers = [
        keras.layers.Embedding(5000, 64),
        keras.layers.LSTM(128),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.Input((40,), dtype="int32"), *layers])
    return model, rng.integers(0, 5000, (64, 40)).astype("int32"), 2


def _transformer(rng: np.random.Generator) -> tuple[Any, Any, int]:
    words, width = 48, 128
    tokens = keras.Input((words,), dtype="int32")
    places = keras.ops.arange(words)
    x = keras.layers.Embedding(5000, width)(tokens)
    x = x + keras.layers.Embedding(words, width)(places)
    for _ in range(2):
        a = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, width // 4, dropout=0.1)(a, a)
        a = keras.layers.LayerNormalization()(x)
        a = keras.layers.Dense(4 * width, activation="gelu")(a)
        x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(width)(a))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    model = keras.Model(tokens, keras.layers.Dense(10)(x))
    return model, rng.integers(0, 5000, (32, words)).astype("int32"), 10


MODELS: dict[str, Callable[[np.random.Generator], tuple[Any, Any, int]]] = {
    "MLP, 10 M parameters": _mlp,
    "MLP, 10 M parameters, Adam": _mlp,
    "CNN, 4 BatchNormalizations": _cnn([(32, 1), (64, 2), (128, 2), (128, 1)]),
    "CNN, 20 BatchNormalizations": _cnn(
        [(16, 2)]
        + [(16, 1)] * 6
        + [(32, 2)]
        + [(32, 1)] * 6
        + [(64, 2)]
        + [(64, 1)] * 5
    ),
    "Embedding, LSTM": _lstm,
    "transformer, 2 blocks": _transformer,
}

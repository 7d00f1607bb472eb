"""The models in Keras 3, for any of its backends; no tfcluster in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras

from benchmarks.trainers.workload import (
    CATEGORIES,
    COUNTS,
    FILTERS,
    TABLE_ROWS,
    TASKS,
    VOCABULARY,
    WORDS,
    Array,
)


def build(name: str, optimizer: str = "sgd", **options: Any) -> Any:
    """The compiled model of this name in ``TASKS``. ``options`` are for ``compile``."""
    keras.utils.set_random_seed(1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = MODELS[name]()
    updates = {"adam": keras.optimizers.Adam(1e-3), "sgd": keras.optimizers.SGD(0.01)}
    model.compile(updates[optimizer], loss, **options)
    return model


def with_batch(name: str, xla: bool | str = "auto") -> tuple[Any, tuple[Array, Array]]:
    """The model with its optimizer and accuracy, and a batch for it.

    ``xla``: whether XLA compiles its steps; "auto" lets Keras decide.
    """
    task = TASKS[name]
    model = build(name, task.optimizer, metrics=["accuracy"], jit_compile=xla)
    return model, task.rows(task.batch)


def _mlp() -> Any:
    layers = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])


def _cnn(name: str) -> Callable[[], Any]:
    """Makes a CNN of convolutions, each of them normalised."""

    def made() -> Any:
        layers: list[Any] = []
        for count, stride in FILTERS[name]:
            layers += [
                keras.layers.Conv2D(count, 3, stride, "same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((32, 32, 3)), *layers])

    return made


def _cnn_dense() -> Any:
    """A CNN of plain convolutions, with most of its weights in a dense layer."""
    layers: list[Any] = [
        keras.layers.Conv2D(count, 3, stride, "same", activation="relu")
        for count, stride in FILTERS["cnn_dense"]
    ]
    layers += [keras.layers.Flatten(), keras.layers.Dense(1152, activation="relu")]
    return keras.Sequential([keras.Input((32, 32, 3)), *layers, keras.layers.Dense(10)])


def _lstm() -> Any:
    layers = [
        keras.layers.Embedding(VOCABULARY, 64),
        keras.layers.LSTM(128),
        keras.layers.Dense(2),
    ]
    return keras.Sequential([keras.Input((40,), dtype="int32"), *layers])


def _transformer() -> Any:
    width = 128
    tokens = keras.Input((WORDS,), dtype="int32")
    places = keras.ops.arange(WORDS)
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
    x = x + keras.layers.Embedding(WORDS, width)(places)
    for _ in range(2):
        a = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, width // 4, dropout=0.1)(a, a)
        a = keras.layers.LayerNormalization()(x)
        a = keras.layers.Dense(4 * width, activation="gelu")(a)
        x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(width)(a))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(tokens, keras.layers.Dense(10)(x))


def _dlrm() -> Any:
    """Embeddings and numbers, the products of all pairs of them, and two MLPs."""
    width = 32
    columns = keras.Input((COUNTS + CATEGORIES,), dtype="int32")
    numbers = keras.ops.log1p(keras.ops.cast(columns[:, :COUNTS], "float32"))
    dense = keras.layers.Dense(256, activation="relu")(numbers)
    dense = keras.layers.Dense(width, activation="relu")(dense)
    vectors = [dense]
    for at in range(COUNTS, COUNTS + CATEGORIES):
        vectors.append(keras.layers.Embedding(TABLE_ROWS, width)(columns[:, at]))
    pairs = itertools.combinations(vectors, 2)
    products = [keras.ops.sum(a * b, axis=1, keepdims=True) for a, b in pairs]
    x = keras.ops.concatenate([dense, *products], axis=1)
    x = keras.layers.Dense(256, activation="relu")(x)
    x = keras.layers.Dense(128, activation="relu")(x)
    return keras.Model(columns, keras.layers.Dense(2)(x))


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": _mlp,
    "mlp_adam": _mlp,
    "cnn": _cnn("cnn"),
    "cnn20": _cnn("cnn20"),
    "cnn_dense": _cnn_dense,
    "lstm": _lstm,
    "transformer": _transformer,
    "dlrm": _dlrm,
}

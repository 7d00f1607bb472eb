"""Models whose steps XLA compiles, on simulated ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.runtime.partition.compiled_functions import calls
from tests.runtime.partition.installed import simulated_ranks

layers = keras.layers


def dense() -> list[Any]:
    hidden = [layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(8, "relu")]
    return [keras.Input((6,)), *hidden, layers.BatchNormalization(), layers.Dense(1)]


def convolutions() -> list[Any]:
    first = [layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization()]
    second = [layers.ReLU(), layers.Dropout(0.2), layers.Conv2D(4, 3)]
    last = [layers.GlobalAveragePooling2D(), layers.Dense(1)]
    return [keras.Input((8, 8, 3)), *first, *second, *last]


def recurrent() -> list[Any]:
    return [keras.Input((7, 6)), layers.LSTM(4, dropout=0.2), layers.Dense(1)]


@pytest.mark.parametrize(
    ("model_layers", "steps"), [(dense, 2), (convolutions, 1), (recurrent, 1)]
)
def test_fit_of_a_compiled_model(
    model_layers: Callable[[], list[Any]], steps: int
) -> None:
    def trained() -> list[Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(model_layers())
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            *("mse", None, None, ["mae"]),
            steps_per_execution=steps,
            jit_compile=True,
        )
        draw = np.random.default_rng(2)
        x = draw.normal(size=(28, *model.input_shape[1:]))
        y = draw.normal(size=(28, 1))
        history = model.fit(x, y, batch_size=12, epochs=2, verbose=0).history
        return [*model.get_weights(), *map(np.array, history.values())]

    expected = trained()
    with simulated_ranks(2, call=True) as hook:
        found = trained()
    programs = [each for each in hook.programs if each.is_divided and each.trains]
    assert programs
    assert all(map(calls, programs))
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, whole, 1e-3, 1e-5)

"""Which variables a training step divides among ranks, and what it exchanges then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfcluster.runtime.partition import variable_placements
from tfcluster.runtime.partition.functions import parsed
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shard
from tfcluster.runtime.partition.propagate import Placed, propagate
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.partition.variable_placements import candidates, shard_of

RANKS = 2
WIDTH = 64
"""Of a layer that is square, so that a batch of as many rows has its kernel's shape."""
LARGE = variable_placements.LEAST_BYTES // 4


def placed(
    optimizer: Any, rows: int = 10, layers: Callable[[], list[Any]] | None = None
) -> tuple[Placed, dict[str, Shard]]:
    """A step with placements, and the variables that it divides, by path."""
    made = layers() if layers else [keras.layers.Dense(WIDTH, activation="tanh")]
    model = keras.Sequential([keras.Input((WIDTH,)), *made, keras.layers.Dense(2)])
    optimizer.build(model.trainable_variables)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
            if hasattr(optimizer, "scale_loss"):
                loss = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        optimizer.apply(gradients, weights)
        return loss

    traced = tf.function(step).get_concrete_function(tf.TensorSpec((rows, WIDTH)))
    inputs = [tf.zeros((rows, WIDTH)), *traced.captured_inputs]
    graph = specialise(parsed(traced.function_def), [Argument.of(i) for i in inputs])
    placements: list[Placement] = [Shard(0, rows), *[REPLICATE] * (len(inputs) - 1)]
    result = propagate(graph, placements, rows, candidates(graph, RANKS))
    paths = {
        id(variable.value.handle): variable.path
        for variable in (*optimizer.variables, *model.variables)
    }
    pairs = zip(graph.inputs, inputs, strict=True)
    names = {value: paths.get(id(tensor), "") for value, tensor in pairs}
    divided = {names[value]: shard for value, shard in result.variables.items()}
    return result, divided


def ends(divided: dict[str, Shard]) -> Counter[str]:
    """How often each last word of a path occurs."""
    return Counter(path.rpartition("_")[2] for path in divided)


@pytest.mark.parametrize("rows", [10, WIDTH, 1])
def test_adam_divides_its_moments_and_no_weight(rows: int) -> None:
    result, divided = placed(keras.optimizers.Adam(), rows)
    assert ends(divided) == {"momentum": 1, "velocity": 1}
    assert set(divided.values()) == {Shard(0, WIDTH)}
    if rows > 1:
        pieces = [v.shape for v, p in result.reduced.items() if p == Shard(0, WIDTH)]
        assert pieces == [(WIDTH, WIDTH)]
    assert not result.whole


def test_what_weights_are_assigned_is_gathered() -> None:
    result, _ = placed(keras.optimizers.Adam())
    gathered = [
        node.inputs[1].shape
        for node in result.nodes
        if node.type == "AssignSubVariableOp"
        and isinstance(result.placements[node.inputs[1]], Shard)
    ]
    assert gathered == [(WIDTH, WIDTH)]


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), {"momentum": 1}),
        (lambda: keras.optimizers.SGD(0.1), {}),
        (
            lambda: keras.optimizers.Adam(amsgrad=True, weight_decay=0.1),
            {"momentum": 1, "velocity": 1, "hat": 1},
        ),
        (lambda: keras.optimizers.SGD(use_ema=True), {"average": 1}),
        (lambda: keras.optimizers.Lion(), {"momentum": 1}),
        (
            lambda: keras.optimizers.RMSprop(centered=True, momentum=0.9),
            {"momentum": 1, "velocity": 1, "gradient": 1},
        ),
    ],
)
def test_slots_of_other_optimizers(
    optimizer: Callable[[], Any], slots: dict[str, int]
) -> None:
    _, divided = placed(optimizer())
    assert ends(divided) == slots


def test_a_norm_of_all_gradients_is_summed_up_from_pieces() -> None:
    result, divided = placed(keras.optimizers.Adam(global_clipnorm=1.0))
    assert ends(divided) == {"momentum": 1, "velocity": 1}
    assert Shard(0, WIDTH) in result.reduced.values()
    # The norm, from parts of it; the loss is made whole where it is returned.
    scalars = [v for v, p in result.reduced.items() if p == REPLICATE and v.shape == ()]
    assert len(scalars) == 1


def test_variables_of_a_branch_stay_whole() -> None:
    _, divided = placed(keras.optimizers.Adam(gradient_accumulation_steps=2))
    assert divided == {}


def test_small_and_short_variables_stay_whole() -> None:
    assert shard_of((LARGE,), tf.float32, 2) == Shard(0, LARGE)
    assert shard_of((LARGE - 1,), tf.float32, 2) is None
    assert shard_of((2, LARGE), tf.float32, 3) == Shard(1, LARGE)
    assert shard_of((LARGE, LARGE), tf.float32, 3) == Shard(0, LARGE)
    assert shard_of((LARGE,), tf.float32, LARGE + 1) is None
    assert shard_of((LARGE * 2,), tf.int64, 2) is None
    assert shard_of((None, LARGE), tf.float32, 2) is None
    assert shard_of(None, tf.float32, 2) is None

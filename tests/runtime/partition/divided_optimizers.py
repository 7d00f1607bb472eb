"""Which variables a training step divides among ranks, and what it exchanges then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import installed
from tfcluster.runtime import tf_patches
from tfcluster.runtime.partition import tf_functions, variable_placements
from tfcluster.runtime.partition.divided_variables import DividedVariables
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import ExchangeRequest
from tfcluster.runtime.partition.functions import parsed
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.optimizer_slots import OptimizerSlots
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    HandleOf,
    Placement,
    Ranks,
    Shard,
)
from tfcluster.runtime.partition.propagate import propagate
from tfcluster.runtime.partition.rewrite import rewrite
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.partition.variable_placements import candidates, shard_of
from tfcluster.runtime.partition.writer import OpWriter, Ref

RANKS = 2
WIDTH = 64
"""Of a layer that is square, so that a batch of as many rows has its kernel's shape."""
LARGE = variable_placements.LEAST_BYTES // 4


def placed(
    optimizer: Any, rows: int = 10, layers: Callable[[], list[Any]] | None = None
) -> tuple[Placed, dict[str, Shard]]:
    """A step with placements, and the variables that it divides, by path."""
    result, divided, _ = placed_inputs(optimizer, rows, layers)
    return result, divided


def placed_inputs(
    optimizer: Any, rows: int, layers: Callable[[], list[Any]] | None
) -> tuple[Placed, dict[str, Shard], list[Any]]:
    """What ``placed`` returns, and the inputs of the step."""
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
    divided = {
        names[value]: held.element
        for value, held in zip(graph.inputs, result.inputs, strict=True)
        if isinstance(held, HandleOf)
    }
    return result, divided, inputs


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


class _OneByOne:
    """Writes exchanges of one tensor each; see ``exchange.Exchanger``."""

    bucket_bytes = 1
    scatters = True
    words = ()

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        name = "_".join(["gather" if _is_rows(r) else "reduce" for r in requests])
        refs = [request.ref for request in requests]
        types = [ref.dtype for ref in refs]
        return writer.op("PyFunc", [refs], {"token": "", "Tout": types}, name)


def _is_rows(request: ExchangeRequest) -> bool:
    return isinstance(request.placement, Shard)


def test_a_weight_is_assigned_before_the_next_one_is_gathered() -> None:
    """So the memory of its last value is there for the next."""
    dense = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(3)]
    result, _, inputs = placed_inputs(keras.optimizers.Adam(), 10, lambda: dense)
    written = rewrite(
        result,
        "step",
        Ranks(RANKS, (0,)),
        _OneByOne(),
        Draws(lambda: 0),
        [tf_functions.handle_data(each) for each in inputs],
        result.inputs,
    )
    nodes = {node.name: node for node in written.definitions[0].node_def}
    gathers = [name for name in nodes if "gather" in name]
    assert len(gathers) == len(dense)
    for earlier, later in pairwise(gathers):
        assert any(
            nodes[name].op == "AssignSubVariableOp"
            and earlier in _ancestors(nodes, name)
            for name in _ancestors(nodes, later)
        )


def _ancestors(nodes: Mapping[str, Any], name: str) -> set[str]:
    """The names of all nodes that run before one of them."""
    found, waiting = set(), [name]
    while waiting:
        for text in nodes[waiting.pop()].input:
            needed = text.removeprefix("^").partition(":")[0]
            if needed in nodes and needed not in found:
                found.add(needed)
                waiting.append(needed)
    return found


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


def test_variables_of_a_branch() -> None:
    result, divided = placed(keras.optimizers.Adam(gradient_accumulation_steps=2))
    assert ends(divided) == {"momentum": 1, "velocity": 1, "accumulator": 1}
    assert not result.whole


def test_variables_of_an_update_with_a_scaled_loss() -> None:
    inner = keras.optimizers.Adam()
    result, divided = placed(keras.optimizers.LossScaleOptimizer(inner))
    assert ends(divided) == {"momentum": 1, "velocity": 1}
    # Whether the gradients are finite is found out from the pieces.
    assert Shard(0, WIDTH) in result.reduced.values()
    assert not result.whole


def test_small_and_short_variables_stay_whole() -> None:
    assert shard_of((LARGE,), tf.float32, 2) == Shard(0, LARGE)
    assert shard_of((LARGE - 1,), tf.float32, 2) is None
    assert shard_of((2, LARGE), tf.float32, 3) == Shard(1, LARGE)
    assert shard_of((LARGE, LARGE), tf.float32, 3) == Shard(0, LARGE)
    assert shard_of((LARGE,), tf.float32, LARGE + 1) is None
    assert shard_of((LARGE * 2,), tf.int64, 2) is None
    assert shard_of((None, LARGE), tf.float32, 2) is None
    assert shard_of(None, tf.float32, 2) is None


# --- trainings ------------------------------------------------------------------------


@contextmanager
def simulated(size: int, *, divides: bool) -> Iterator[DividedVariables]:
    """All ranks in this process; those that divide optimizers' variables, or not."""
    ranks = Ranks(size, tuple(range(size)))
    variables = DividedVariables(ranks)
    slots = OptimizerSlots(variables)
    # The last handler counts; without divided variables it changes nothing.
    tf_patches.TABLE.install({tf_patches.VARIABLE_HANDLE: slots.handle})
    given = slots if divides else None
    with installed(Hook(ranks, strict=True, variables=variables, slots=given)):
        yield variables
    slots.make_whole()


def trained(
    optimizer: Callable[[], Any], steps_per_execution: int
) -> tuple[dict[str, Any], list[Any]]:
    """The state after a training with an odd last batch, and the optimizer's."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Dense(7, activation="tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(9), keras.layers.Dense(2)])
    used = optimizer()
    model.compile(used, "mse", steps_per_execution=steps_per_execution)
    random = np.random.default_rng(1)
    x, y = (random.normal(size=(22, n)).astype(np.float32) for n in (5, 2))
    model.fit(x, y, 8, epochs=2, verbose=0, shuffle=False)
    handles = [tf_functions.handle_of(each.value) for each in used.variables]
    return {v.path: v for v in (*model.variables, *used.variables)}, handles


TRAININGS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "plain": (lambda: keras.optimizers.Adam(0.01), 1, 2),
    "several steps": (lambda: keras.optimizers.Adam(0.01), 3, 3),
    "accumulated": (
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        *(1, 3),
    ),
    "scaled": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
        *(1, 2),
    ),
    "scaled, several steps": (
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9)
        ),
        *(2, 3),
    ),
}
"""An optimizer, the steps of an execution, and the number of ranks."""


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_have_equal_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_placements, "LEAST_BYTES", 1)
    optimizer, steps, size = TRAININGS[name]
    with simulated(size, divides=False):
        state, _ = trained(optimizer, steps)
        expected = {path: value.numpy() for path, value in state.items()}
    with simulated(size, divides=True) as variables:
        state, handles = trained(optimizer, steps)
        divided = [handle for handle in handles if variables.is_divided(handle)]
        # Kernels and biases, but for one that is shorter than there are ranks.
        assert len(divided) >= 5
        ours = {path: value.numpy() for path, value in state.items()}
        assert not any(map(variables.is_divided, handles))
    assert [*ours] == [*expected]
    # Whole accumulators are added to one rank's term; pieces, as on one machine, to the
    # sum.
    tolerance = 1e-4 if name == "accumulated" else 0.0
    for path, value in expected.items():
        np.testing.assert_allclose(
            ours[path], value, tolerance, tolerance / 100, err_msg=path
        )

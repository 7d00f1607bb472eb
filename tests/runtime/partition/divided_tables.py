"""Tables that are divided by rows among simulated ranks train as whole ones do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import installed
from tests.runtime.partition.simulated import SIZES
from tfcluster.runtime.keras.train import divided_weights
from tfcluster.runtime.keras.train.divided_weights import DividedWeights
from tfcluster.runtime.partition import divided_checkpoints
from tfcluster.runtime.partition.divided_variables import DividedVariables
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.tensor_types import Array, Tensor

ROWS, WIDTH, BATCH = 23, 4, 16
ALL_SIZES = "TFCLUSTER_PARTITION_EXAMPLES" in os.environ
LIMIT = ROWS * WIDTH * 4 - 1
"""The table and what optimizers have for it are larger; all other weights are not."""


class _Simulation:
    """The tables of the ranks that are being simulated."""

    def __init__(self) -> None:
        self.tables = DividedVariables(Ranks(1, (0,)))
        self.warned: list[str] = []

    @contextmanager
    def of(self, size: int) -> Iterator[Hook]:
        ranks = Ranks(size, tuple(range(size)))
        self.tables = DividedVariables(ranks, None, self.warned.append, LIMIT)
        # The last handlers count.
        DividedWeights(self.tables, warn=self.warned.append).install()
        try:
            with installed(Hook(ranks, strict=True, variables=self.tables)) as hook:
                yield hook
        finally:
            DividedWeights(DividedVariables(Ranks(1, (0,)))).install()


@pytest.fixture
def simulation() -> _Simulation:
    return _Simulation()


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ids(seed: int, *shape: int) -> Array:
    """Few of many rows, so that some come twice in a batch."""
    return np.random.default_rng(seed).integers(0, ROWS, shape).astype(np.int32)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
}


def fitted(optimizer: Callable[[], Any]) -> dict[str, Array]:
    """The weights, slots and losses after a training with an odd last batch."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    tokens, dense = keras.Input((4,), dtype="int32"), keras.Input((2,))
    rows = keras.layers.Embedding(ROWS, WIDTH, mask_zero=True)(tokens)
    pooled = keras.layers.GlobalAveragePooling1D()(rows)
    joined = keras.layers.Concatenate()([pooled, dense])
    model = keras.Model([tokens, dense], keras.layers.Dense(1)(joined))
    model.compile(optimizer(), "mse")
    x, y = [ids(1, 40, 4), numbers(2, 40, 2)], numbers(3, 40, 1)
    losses = model.fit(x, y, BATCH, epochs=2, verbose=0, shuffle=False).history["loss"]
    values = {v.path: v.numpy() for v in (*model.variables, *model.optimizer.variables)}
    predicted = model.predict(x, verbose=0)
    return {**values, "losses": np.array(losses), "predicted": predicted}


def assert_close(ours: dict[str, Array], expected: dict[str, Array]) -> None:
    assert [*ours] == [*expected]
    for name, value in expected.items():
        np.testing.assert_allclose(
            ours[name], value, rtol=2e-5, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize(
    ("size", "name"),
    itertools.product((2, 3), OPTIMIZERS) if ALL_SIZES else [(2, "sgd"), (3, "adam")],
)
def test_optimizers(simulation: _Simulation, name: str, size: int) -> None:
    expected = fitted(OPTIMIZERS[name])
    with simulation.of(size) as hook:
        assert_close(fitted(OPTIMIZERS[name]), expected)
    assert simulation.warned == []
    assert all(p.is_divided for p in hook.programs if p.trains)


# --- single ops -----------------------------------------------------------------------


def run(
    simulation: _Simulation,
    size: int,
    step: Callable[[Any, Tensor], Any],
    batch: Array,
) -> tuple[list[Array], list[Array]]:
    """What a function returns, and the table afterwards: divided, and whole."""
    results = []
    value = numbers(5, ROWS, WIDTH)

    def call() -> list[Array]:
        table = keras.Variable(keras.initializers.Zeros(), (ROWS, WIDTH), "float32")
        table.assign(value)
        function = tf.function(lambda x: step(table.value, x))
        outputs = [np.asarray(each) for each in tf.nest.flatten(function(batch))]
        return [*outputs, table.numpy()]

    results = call()
    with simulation.of(size) as hook:
        divided_results = call()
        assert all(p.is_divided for p in hook.programs if p.trains)
    return divided_results, results


STEPS: dict[str, Callable[[Any, Tensor], Any]] = {
    "gather of a read": lambda table, x: tf.gather(tf.convert_to_tensor(table), x),
    "gather of a handle": lambda table, x: table.sparse_read(x),
    "assign": lambda table, x: table.assign(table * 2.0).read_value()[:3],
    "scatter add": lambda table, x: _scatter(table.scatter_add, x),
    "scatter sub": lambda table, x: _scatter(table.scatter_sub, x),
    "scatter max": lambda table, x: _scatter(table.scatter_max, x),
    "sum at rows": lambda table, x: table.assign_add(
        tf.math.unsorted_segment_sum(_updates(x), tf.reshape(x, [-1]), ROWS)
    ).read_value()[0],
    "norm": lambda table, x: tf.reduce_sum(tf.square(table)),
    "product": lambda table, x: tf.matmul(
        tf.gather(table, x[:, 0]), table, transpose_b=True
    ),
    "reads in a loop": lambda table, x: tf.while_loop(
        lambda i, total: i < 3,
        lambda i, total: (i + 1, total + tf.reduce_sum(tf.gather(table, x))),
        (0, 0.0),
    )[1],
    "in a branch": lambda table, x: tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.gather(table, x),
        lambda: tf.zeros((BATCH, 3, WIDTH)),
    ),
    "ragged": lambda table, x: tf.reduce_sum(
        tf.gather(
            table, tf.RaggedTensor.from_tensor(x, lengths=tf.math.floormod(x[:, 0], 4))
        ).flat_values,
        0,
    ),
}


def _updates(x: Tensor) -> Tensor:
    count = tf.size(x)
    places: Tensor = tf.reshape(tf.range(count * WIDTH), [count, WIDTH])
    scaled: Tensor = tf.cast(places, tf.float32) / 64
    return scaled


def _scatter(scatter: Callable[[Any], Any], x: Tensor) -> Tensor:
    changed = scatter(tf.IndexedSlices(_updates(x), tf.reshape(x, [-1])))
    first: Tensor = changed.read_value()[0]
    return first


SIZE_OF = dict(zip(STEPS, itertools.cycle((3, 2, 5, 1)), strict=False))
"""On how many ranks an op is tested in each run of all tests."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in STEPS
        for size in SIZES
        if ALL_SIZES or size == SIZE_OF[name]
    ],
)
def test_ops(simulation: _Simulation, name: str, size: int) -> None:
    ours, expected = run(simulation, size, STEPS[name], ids(6, BATCH, 3))
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# --- eager code -----------------------------------------------------------------------


def _gradient(function: Callable[[], Any], table: Any) -> Tensor:
    with tf.GradientTape() as tape:
        loss = function()
    gradient: Tensor = tf.convert_to_tensor(tape.gradient(loss, table))
    return gradient


EAGER: dict[str, Callable[[Any, Any], Any]] = {
    "operators": lambda weight, table: [weight * 2.0, weight - 1.0, 1.0 - weight],
    "keras.ops": lambda weight, table: keras.ops.normalize(weight, axis=1),
    "ops": lambda weight, table: [tf.square(table), tf.multiply(table, 2.0)],
    "lists": lambda weight, table: [tf.stack([table, table]), tf.concat([table], 0)],
    "shape": lambda weight, table: [tf.shape(table), tf.reduce_sum(table)],
    "norm": lambda weight, table: tf.nn.l2_loss(table),
    "gradient": lambda weight, table: _gradient(lambda: tf.nn.l2_loss(table), table),
    "gradient of rows": lambda weight, table: _gradient(
        lambda: tf.reduce_sum(tf.gather(table, [1, ROWS - 1]) ** 2), table
    ),
    "gather_nd": lambda weight, table: table.gather_nd([[1, 2], [ROWS - 1, 0]]),
    "assign_sub": lambda weight, table: weight.assign_sub(numbers(8, ROWS, WIDTH)),
    "scatter_nd_update": lambda weight, table: table.scatter_nd_update(
        [[1, 2], [ROWS - 1, 0]], [5.0, 6.0]
    ),
    "slice": lambda weight, table: table[3:9].assign(tf.ones((6, WIDTH))),
    "a copy": lambda weight, table: tf.Variable(table),
    "argument of a function": lambda weight, table: tf.function(
        lambda variable: tf.reduce_sum(tf.gather(variable, [1, ROWS - 1]), 1)
    )(table),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_code_sees_and_changes_all_rows(
    simulation: _Simulation, name: str
) -> None:
    def results() -> list[Array]:
        weight = keras.Variable(keras.initializers.Zeros(), (ROWS, WIDTH), "float32")
        weight.assign(numbers(5, ROWS, WIDTH))
        seen = EAGER[name](weight, weight.value)
        return [*map(np.asarray, tf.nest.flatten(seen)), weight.numpy()]

    expected = [each for each in results() if each.dtype != object]
    with simulation.of(3):
        ours = [each for each in results() if each.dtype != object]
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# --- creation -------------------------------------------------------------------------

INITIALIZERS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: keras.initializers.RandomUniform(seed=5),
    "normal": lambda: keras.initializers.RandomNormal(seed=6),
    "truncated": lambda: keras.initializers.HeNormal(seed=7),
    "constant": lambda: keras.initializers.Constant(0.3),
}
ODD = (1037, 7)
"""Rows that begin within a group of random numbers."""


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_are_made_with_the_bits_of_the_whole(
    simulation: _Simulation, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = keras.Variable(INITIALIZERS[name](), ODD, dtype).numpy()
    monkeypatch.setattr(divided_weights, "CHUNK_BYTES", 5000)
    with simulation.of(3):
        variable = keras.Variable(INITIALIZERS[name](), ODD, dtype)
        assert simulation.tables.of(variable.value.handle) is not None
        np.testing.assert_array_equal(variable.numpy(), expected)
    assert simulation.warned == []


def test_other_initializers_make_all_rows(
    simulation: _Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(shape: Any, dtype: Any = None) -> Tensor:
        calls.append(shape)
        value: Tensor = tf.ones(shape, dtype)
        return value

    calls: list[Any] = []
    monkeypatch.setattr(divided_weights, "CHUNK_BYTES", 100)
    with simulation.of(2):
        variable = keras.Variable(ones, ODD, "float32")
        np.testing.assert_array_equal(variable.numpy(), np.ones(ODD))
    (warning,) = simulation.warned
    assert "makes all rows" in warning
    assert len(calls) == 1


def test_a_rank_holds_its_rows_only(simulation: _Simulation) -> None:
    with simulation.of(3):
        variable = keras.Variable(keras.initializers.Zeros(), (ROWS, WIDTH), "float32")
        table = simulation.tables.of(variable.value.handle)
        assert table is not None
        assert [tuple(piece.shape) for piece in table.pieces] == [
            (7, 4),
            (8, 4),
            (8, 4),
        ]
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.raw_ops.ResourceGather(
                resource=variable.value.handle, indices=[0], dtype=tf.float32
            )


# --- checkpoints ----------------------------------------------------------------------


def test_checkpoints_have_slices_that_tensorflow_reads(
    simulation: _Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided_checkpoints, "SLICE_BYTES", 100)
    value, prefix = numbers(5, ROWS, WIDTH), str(tmp_path / "table")
    with simulation.of(3):
        saved = tf.train.Checkpoint(table=_zeros(), other=tf.Variable(3.0))
        saved.table.assign(value)
        path = saved.save(prefix)
    files = list(tmp_path.glob("table-1.data-*"))
    assert len(files) == 5, "four slices of six rows at most, and all other variables"
    assert not (tmp_path / "table-1_temp").exists()
    key = "table/.ATTRIBUTES/VARIABLE_VALUE"
    np.testing.assert_array_equal(tf.train.load_variable(path, key), value)
    with simulation.of(2):
        restored = tf.train.Checkpoint(table=_zeros(), other=tf.Variable(0.0))
        restored.restore(path).assert_consumed()
        np.testing.assert_array_equal(restored.table.numpy(), value)
        assert float(restored.other) == 3


def test_a_checkpoint_of_one_process(simulation: _Simulation, tmp_path: Path) -> None:
    value = numbers(5, ROWS, WIDTH)
    path = tf.train.Checkpoint(table=tf.Variable(value)).save(str(tmp_path / "table"))
    with simulation.of(3):
        table = _zeros()
        tf.train.Checkpoint(table=table).restore(path).assert_consumed()
        np.testing.assert_array_equal(table.numpy(), value)


def _zeros() -> Any:
    return keras.Variable(keras.initializers.Zeros(), (ROWS, WIDTH), "float32")


# --- variables that stay whole --------------------------------------------------------


def test_a_variable_of_tensorflow_stays_whole_and_a_warning_says_so(
    simulation: _Simulation,
) -> None:
    with simulation.of(2):
        table = tf.Variable(numbers(5, ROWS, WIDTH), name="mine")
        looked_up = tf.function(lambda x: tf.gather(table, x))
        looked_up(tf.constant(ids(6, BATCH, 3)))
    (warning,) = set(simulation.warned)
    assert "larger than runtime.shard_tables" in warning

"""Exchanges by TensorFlow's collective ops give every rank the whole tensors.

The ranks are devices of this process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from tests.kit.ranks import in_threads
from tfcluster.runtime.collective.transports.tensorflow.devices import (
    RING,
    DeviceGroup,
    Groups,
)
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.collective_ops import (
    Collectives,
    Counters,
    OpsExchanger,
)
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import BUCKET_BYTES, ExchangeRequest
from tfcluster.runtime.partition.functions import parsed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    Partial,
    Ranks,
    Shard,
    Split,
)
from tfcluster.runtime.partition.propagate import propagate
from tfcluster.runtime.partition.rewrite import rewrite
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.partition.writer import OpWriter, Ref

MOST = 4
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("uint64", "float16", "bfloat16", "float32", "float64", "complex64"),
    "complex128",
)
TASK = "/job:localhost/replica:0/task:0"
COUNTERS = Counters(
    "tfcluster_test_begun", "tfcluster_test_ended", f"{TASK}/device:CPU:0"
)
Array = NDArray[Any]
numbers = itertools.count(1)


def setup_module() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    several = [tf.config.LogicalDeviceConfiguration()] * MOST
    tf.config.set_logical_device_configuration(cpu, several)
    for name in (COUNTERS.begun, COUNTERS.ended):
        tf.raw_ops.AssignVariableOp(
            resource=variable(name), value=tf.constant(0, tf.int64)
        )


def variable(name: str) -> Any:
    return tf.raw_ops.VarHandleOp(
        container="", shared_name=name, dtype=tf.int64, shape=[]
    )


def counted(name: str) -> int:
    handle = variable(name)
    return int(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64))


class NoHost:
    """An exchanger that refuses everything, and notes what it was asked for."""

    words = ()
    bucket_bytes = BUCKET_BYTES
    scatters = False

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        raise NotImplementedError([each.name for each in requests])


def collectives(devices: list[int], rank: int) -> Collectives:
    """Those of a rank; ``devices`` are the numbers of the ranks' devices."""
    key = 1000 + int("".join(map(str, sorted(devices))))
    name = f"{TASK}/device:CPU:{devices[rank]}"
    own = DeviceGroup(key, len(devices), name, RING)
    # TensorFlow gathers in the order of the devices' names.
    order = sorted(range(len(devices)), key=devices.__getitem__)
    return Collectives(rank, Groups(own, own), tuple(order), COUNTERS)


def on_all(size: int, act: Callable[[int], list[Array]]) -> list[list[Array]]:
    """What ``act`` returns for each rank; the ranks are threads."""
    outcomes = in_threads([partial(act, rank) for rank in range(size)])
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def exchanged(
    parts: list[list[tuple[Array, Partial | Shard, tuple[int, ...]]]],
    devices: list[int],
) -> list[list[Array]]:
    """What each rank has after an exchange of its parts."""
    program = f"program {next(numbers)}"
    names = []
    for rank, own in enumerate(parts):
        writer = OpWriter("exchange")
        requests = [
            ExchangeRequest(
                writer.argument(tf.as_dtype(array.dtype), array.shape),
                placement,
                shape,
                f"tensor {i}",
            )
            for i, (array, placement, shape) in enumerate(own)
        ]
        exchanger = OpsExchanger(collectives(devices, rank), NoHost(), program)
        found = exchanger.write(writer, requests)
        assert len(exchanger.words) == len(requests)
        tf_functions.register(writer.finish(found, [writer.last]))
        names.append(writer.name)

    def act(rank: int) -> list[Array]:
        inputs = [tf.constant(array) for array, *_ in parts[rank]]
        found = tf_functions.call(names[rank], inputs, len(inputs))
        return [each.numpy() for each in found]

    return on_all(len(parts), act)


def random_array(draw: np.random.Generator, dtype: str, shape: Any) -> Array:
    values: Any = draw.integers(-60, 60, shape)
    if dtype.startswith("complex"):
        values = values + 1j * draw.integers(-60, 60, shape)
    if dtype == "bool":
        values = values > 0
    found: Array = values.astype(tf.as_dtype(dtype).as_numpy_dtype)
    return found


def random_parts(seed: int, size: int) -> tuple[list[list[Any]], list[Array]]:
    """The ranks' parts of several tensors, and the whole tensors."""
    chance, draw = random.Random(seed), np.random.default_rng(seed)
    rows = chance.randint(size, 3 * size)
    parts: list[list[Any]] = [[] for _ in range(size)]
    wholes = []
    for _ in range(chance.randint(1, 6)):
        dtype = chance.choice(DTYPES)
        shape = [chance.randint(1, 4) for _ in range(chance.randint(0, 3))]
        kinds = ["shard"]
        if not dtype.startswith("complex"):
            kinds += ["max", "min"]
        if dtype != "bool":
            kinds += ["sum"]
        kind = chance.choice(kinds)
        if kind != "shard":
            terms = [random_array(draw, dtype, shape) for _ in range(size)]
            act = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kind]
            whole = terms[0]
            for term in terms[1:]:
                whole = np.asarray(act(whole, term))
            wholes.append(whole)
            for own, term in zip(parts, terms, strict=True):
                own.append((term, Partial(kind), tuple(shape)))
            continue
        dim = chance.randint(0, len(shape))
        outer, inner = chance.randint(1, 3), chance.randint(1, 3)
        shard = Shard(dim, rows, outer, inner)
        shape.insert(dim, shard.size)
        whole = random_array(draw, dtype, shape)
        wholes.append(whole)
        blocks = whole.reshape(*shape[:dim], outer, rows * inner, *shape[dim + 1 :])
        for rank, own in enumerate(parts):
            split = Split(rank, size)
            first = split.first(rows) * inner
            count = split.count(rows) * inner
            part = np.take(blocks, range(first, first + count), dim + 1)
            local = split.local_shape(shape, shard)
            own.append((part.reshape(local), shard, tuple(shape)))
    return parts, wholes


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_every_rank_gets_the_whole(size: int, seed: int) -> None:
    parts, wholes = random_parts(seed, size)
    begun, ended = counted(COUNTERS.begun), counted(COUNTERS.ended)
    devices = random.Random(seed).sample(range(size), size)
    for found in exchanged(parts, devices):
        for one, whole in zip(found, wholes, strict=True):
            assert one.dtype == whole.dtype
            assert one.shape == whole.shape
            np.testing.assert_array_equal(one, whole)
    assert counted(COUNTERS.begun) == begun + size
    assert counted(COUNTERS.ended) == ended + size


@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_in_loops_and_branches(size: int) -> None:
    def steps(x: Any, w: Any) -> Any:
        def step(number: Any, w: Any) -> Any:
            scaled = x * w
            mean = tf.reduce_mean(scaled, 0)
            w = tf.cond(
                tf.reduce_sum(mean) > 0.0,
                lambda: w - tf.reduce_sum(tf.sin(scaled - mean), 0) / 9.0,
                lambda: w + tf.reduce_max(scaled, 0) / 9.0,
            )
            return number + 1, w

        return tf.while_loop(lambda number, w: number < 7, step, (0, w))[1]

    draw = np.random.default_rng(1)
    inputs = [tf.constant(draw.normal(size=each)) for each in ((11, 5), (5,))]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    traced = tf.function(steps, autograph=False).get_concrete_function(*specs)
    names = []
    for rank in range(size):
        arguments = [Argument.of(each) for each in inputs]
        graph = specialise(parsed(traced.function_def), arguments)
        placed = propagate(graph, [Shard(0, 11), REPLICATE], 11)
        own = collectives([*range(size)], rank)
        exchanger = OpsExchanger(own, NoHost(), "loop")
        ranks, draws = Ranks(size, (rank,)), Draws(lambda: 1)
        written = rewrite(placed, "loop", ranks, exchanger, draws)
        tf_functions.register(written.definitions[0])
        names.append(written.name)
    before = counted(COUNTERS.ended)
    found = on_all(
        size, lambda rank: [tf_functions.call(names[rank], inputs, 1)[0].numpy()]
    )
    whole = traced(*inputs).numpy()
    for (one,) in found:
        np.testing.assert_allclose(one, whole, 1e-12, 1e-12)
        np.testing.assert_array_equal(one, found[0][0])
    assert counted(COUNTERS.ended) >= before + 2 * 7 * size
    assert counted(COUNTERS.ended) == counted(COUNTERS.begun)

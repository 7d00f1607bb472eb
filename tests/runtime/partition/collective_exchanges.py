"""Exchanges by TensorFlow's collective ops give every rank the whole tensors.

The ranks are devices of this process.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from tests.runtime.ranks import in_threads
from tfcluster.runtime.collective.transports.tensorflow.ops import RING, Devices
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.collective_ops import (
    Collectives,
    Counters,
    OpsExchanger,
)
from tfcluster.runtime.partition.exchange import Request
from tfcluster.runtime.partition.placement import Partial, Shard, Split
from tfcluster.runtime.partition.writer import Ref, Writer

MOST = 4
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("uint64", "float16", "bfloat16", "float32", "float64", "complex64"),
    "complex128",
)
TASK = "/job:localhost/replica:0/task:0"
COUNTERS = Counters("tfcluster_test_begun", "tfcluster_test_ended", f"{TASK}/device:CPU:0")
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

    def write(self, writer: Writer, requests: list[Request]) -> list[Ref]:
        raise NotImplementedError([each.name for each in requests])


def collectives(size: int, rank: int) -> Collectives:
    name = f"{TASK}/device:CPU:{rank}"
    devices = Devices(1000 + size, size, name, RING)
    return Collectives(rank, devices, devices, tuple(range(size)), COUNTERS)


def exchanged(
    parts: list[list[tuple[Array, Partial | Shard, tuple[int, ...]]]],
    loop: bool = False,
) -> list[list[Array]]:
    """What each rank has after an exchange of its parts."""
    size = len(parts)
    program = f"program {next(numbers)}"
    names = []
    for rank, own in enumerate(parts):
        writer = Writer("exchange")
        requests = [
            Request(
                writer.argument(tf.as_dtype(array.dtype), array.shape),
                placement,
                shape,
                f"tensor {i}",
            )
            for i, (array, placement, shape) in enumerate(own)
        ]
        exchanger = OpsExchanger(collectives(size, rank), NoHost(), program)
        found = exchanger.write(writer, requests)
        assert len(exchanger.words) == len(requests)
        tf_functions.register(writer.finish(found, [writer.last]))
        names.append(repeated(writer.name, requests, 3) if loop else writer.name)

    def act(rank: int) -> list[Array]:
        inputs = [tf.constant(array) for array, *_ in parts[rank]]
        found = tf_functions.call(names[rank], inputs, len(inputs))
        return [each.numpy() for each in found]

    outcomes = in_threads([lambda r=rank: act(r) for rank in range(size)])  # type: ignore[misc]
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def repeated(name: str, requests: list[Request], times: int) -> str:
    """A function that calls another one in each turn of a loop."""
    writer = Writer("repeated")
    raise NotImplementedError(writer, name, requests, times)


def random_array(draw: np.random.Generator, dtype: str, shape: Any) -> Array:
    values = draw.integers(-60, 60, shape)
    if dtype.startswith("complex"):
        return (values + 1j * draw.integers(-60, 60, shape)).astype(dtype)
    if dtype == "bool":
        return values > 0
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


def random_parts(
    seed: int, size: int
) -> tuple[list[list[Any]], list[Array]]:
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
    for found in exchanged(parts):
        for one, whole in zip(found, wholes, strict=True):
            assert one.dtype == whole.dtype
            assert one.shape == whole.shape
            np.testing.assert_array_equal(one, whole)
    assert counted(COUNTERS.begun) == begun + size
    assert counted(COUNTERS.ended) == ended + size

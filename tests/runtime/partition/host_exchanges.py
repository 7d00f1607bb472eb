"""Exchanges by the host give every rank the whole tensors, of all sizes at once.

The ranks are threads, two of them: each op that waits for others takes one of the few
threads that TensorFlow has for ops. Small tensors travel with an exchange's header.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.kit.ranks import as_threads, results
from tests.runtime.partition.collective_exchanges import random_parts
from tfcluster.runtime.collective import Group
from tfcluster.runtime.collective.packing import ALONE_BYTES
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.exchange import ExchangeRequest, HostExchanger
from tfcluster.runtime.partition.placement import Partial
from tfcluster.runtime.partition.writer import OpWriter
from tfcluster.runtime.tensor_types import Array

LARGE = ALONE_BYTES // 4 + 1
"""Elements of float32 that go without others."""
HOSTS = {"one host": None, "a host for each rank": ""}
numbers = itertools.count(1)


def exchanged(
    parts: Sequence[Sequence[tuple[Array, Any, tuple[int, ...]]]], key: str | None
) -> tuple[list[list[Array]], list[int]]:
    """What each rank has after an exchange, and how often it called the transport."""
    program = f"host program {next(numbers)}"

    def act(group: Group) -> tuple[list[Array], int]:
        own = parts[group.rank]
        group.transport.join()  # as after any exchange
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
        exchanger = HostExchanger(group, program)
        found = exchanger.write(writer, requests)
        tf_functions.register(writer.finish(found, [writer.last]))
        calls = count_calls(group)
        inputs = [tf.constant(array) for array, *_ in own]
        outputs = tf_functions.call(writer.name, inputs, len(inputs))
        return [output.numpy() for output in outputs], len(calls)

    size = len(parts)
    outcomes = results(as_threads(size, act, None if key is None else [key] * size))
    return [found for found, _ in outcomes], [calls for _, calls in outcomes]


def count_calls(group: Group) -> list[str]:
    """The names of the transport's operations that are called from now on."""
    calls: list[str] = []
    for name in ("allgather", "allreduce", "alltoall", "reduce_scatter"):
        operation = getattr(group.transport, name)

        def call(
            *args: Any, name: str = name, act: Any = operation, **more: Any
        ) -> Any:
            calls.append(name)
            return act(*args, **more)

        setattr(group.transport, name, call)
    return calls


@pytest.mark.parametrize("key", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("seed", range(8))
def test_tensors_of_all_kinds_are_whole(seed: int, key: str | None) -> None:
    size = 2
    parts, wholes = random_parts(seed, size)
    large = np.arange(LARGE, dtype=np.float32)
    empty = np.zeros((0, 3), np.float32)
    for own in parts:
        own.insert(len(own) // 2, (large, Partial("sum"), large.shape))
        own.append((empty, Partial("sum"), empty.shape))
    expected = [*wholes, empty]
    expected.insert(len(wholes) // 2, large * size)
    for found in exchanged(parts, key)[0]:
        for array, whole in zip(found, expected, strict=True):
            assert array.dtype == whole.dtype
            np.testing.assert_array_equal(array, whole)


@pytest.mark.parametrize(
    ("counts", "key", "calls"),
    [
        ([3, 10], None, 1),
        ([3, 10], "", 1),
        ([LARGE, 3, 10], None, 2),
        ([LARGE, 3, 10], "", 2),
        ([3000, 3, 4000], None, 2),
        ([3000, 3, 4000], "", 1),
        ([3000, 3, 70000], "", 2),
    ],
)
def test_small_tensors_need_no_round_of_their_own(
    counts: list[int], key: str | None, calls: int
) -> None:
    kind = Partial("sum")
    own = [(np.ones(n, np.float32), kind, (n,)) for n in counts]
    found, called = exchanged([own, own], key)
    assert called == [calls] * 2
    for arrays in found:
        assert [array.tolist() for array in arrays] == [[2.0] * n for n in counts]

# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Allgather, broadcast, alltoall, objects and shutdown, on every rank."""

import itertools

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs.api_data import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    OPS,
    combined,
    of_rank,
    pairs,
    refuses,
    same,
)
from tests.runtime.programs.checks import RANK, SIZE


def check_allgather():
    dtypes = (*FLOATS, *INTEGERS, *COMPLEX, "bool")
    for dtype, axis in zip(dtypes, itertools.cycle((0, 1, 2, -1)), strict=False):

        def part(rank, axis=axis, dtype=dtype):
            own = [2, 3, 2]
            own[axis] = rank  # Empty on rank 0.
            return of_rank(rank, own, dtype)

        found = tfc.allgather(tf.constant(part(RANK)), axis)
        expected = np.concatenate([part(rank) for rank in range(SIZE)], axis)
        assert found.dtype.name == dtype
        np.testing.assert_array_equal(found.numpy(), expected)

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def gathered(tensor):
        return tfc.allgather(tensor)

    assert gathered(tf.ones([RANK, 2])).shape == (sum(range(SIZE)), 2)


def check_broadcast():
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, "bool"):
        root = SIZE - 1
        found = tfc.broadcast(tf.constant(of_rank(RANK, (3,), dtype)), root)
        np.testing.assert_array_equal(found.numpy(), of_rank(root, (3,), dtype))
    variables = [
        tf.Variable([float(RANK)]),
        keras.Variable(RANK),
        tf.Variable(RANK == 0),
    ]
    tfc.broadcast_variables(variables, root_rank=0)
    assert [v.numpy().tolist() for v in variables] == [[0.0], 0, True]

    @tf.function
    def again():
        tfc.broadcast_variables(variables, root_rank=SIZE - 1)

    variables[0].assign([RANK + 1.0])
    again()
    assert variables[0].numpy().tolist() == [float(SIZE)]


def check_alltoall():
    def part(rank, splits, dtype="float32"):
        return of_rank(rank, (sum(splits) + 1, 2), dtype)

    def splits(rank):
        return [(rank + peer) % 3 for peer in range(SIZE)]

    def received(dtype):
        rows = []
        for rank in range(SIZE):
            start = sum(splits(rank)[:RANK])
            end = start + splits(rank)[RANK]
            rows.append(part(rank, splits(rank), dtype)[start:end])
        return np.concatenate(rows)

    for dtype in ("float32", "bfloat16", "int64", "bool"):
        own = tf.constant(part(RANK, splits(RANK), dtype))
        for act in (tfc.alltoall, tf.function(tfc.alltoall)):
            found, counts = act(own, tf.constant(splits(RANK)))
            np.testing.assert_array_equal(found.numpy(), received(dtype))
            assert counts.numpy().tolist() == [splits(r)[RANK] for r in range(SIZE)]
            assert counts.dtype == tf.int32
    even = tfc.alltoall(tf.range(2 * SIZE) + 100 * RANK)
    assert even.numpy().tolist() == [
        100 * rank + 2 * RANK + i for rank in range(SIZE) for i in (0, 1)
    ]
    if SIZE > 1:
        refuses(ValueError, "evenly", lambda: tfc.alltoall(tf.zeros([2 * SIZE + 1])))
    refuses(ValueError, "splits", lambda: tfc.alltoall(tf.zeros([1]), [1, 1] * SIZE))


def check_reducescatter():
    counts = itertools.cycle((2 * SIZE, 2 * SIZE + 1, 3 * SIZE - 1, 0))
    for (dtype, name), rows in zip(pairs(), counts, strict=False):
        parts = [of_rank(rank, (rows, 2), dtype) for rank in range(SIZE)]
        each, more = divmod(rows, SIZE)
        start = RANK * each + min(RANK, more)
        end = start + each + int(more > RANK)
        found = tfc.reducescatter(tf.constant(parts[RANK]), op=OPS[name])
        same(found, combined(name, parts)[start:end], dtype)
    own = tf.ones([SIZE, 2]) * RANK
    np.testing.assert_allclose(tfc.reducescatter(own).numpy(), [[(SIZE - 1) / 2] * 2])


class Own:
    pass


def check_objects():
    own = {
        "text": "naïve ☃",
        "numbers": [1, 2.5, True, None, 10**30, float("inf")],
        "tuple": (RANK, (b"\0\xff", "a")),
        3: {"array": np.arange(4.0).reshape(2, 2) + RANK, (1, "x"): np.int8(-3)},
        "": {"\0": 1},
    }
    for root in {0, SIZE - 1}:
        found = tfc.broadcast_object(own if root == RANK else object(), root)
        assert repr(found) == repr(
            {**own, "tuple": (root, (b"\0\xff", "a")), 3: found[3]}
        )
        np.testing.assert_array_equal(
            found[3]["array"], np.arange(4.0).reshape(2, 2) + root
        )
        assert type(found[3][1, "x"]) is np.int8
    assert tfc.allgather_object([RANK] * RANK) == [[r] * r for r in range(SIZE)]
    for bad in (Own(), {1}, Own, lambda: 1, np.array([Own()]), {"a": [Own()]}):
        sent = bad if RANK == SIZE - 1 else 1
        words = f"rank {SIZE - 1} cannot be sent"
        refuses(TypeError, words, lambda sent=sent: tfc.allgather_object(sent))
        refuses(
            TypeError, words, lambda sent=sent: tfc.broadcast_object(sent, SIZE - 1)
        )
    refuses(ValueError, "rank 9 is not among", lambda: tfc.broadcast_object(1, 9))


def check_barrier_and_shutdown():
    tfc.barrier()
    tfc.shutdown()
    assert not tfc.is_initialized()
    refuses(tfc.CollectiveError, "init", lambda: tfc.allreduce(tf.constant(1.0)))
    tfc.init()
    assert float(tfc.allreduce(tf.constant(1.0), op=tfc.Sum)) == SIZE

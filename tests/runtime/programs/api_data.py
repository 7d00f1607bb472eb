# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""The inputs of ranks and the expected results, for programs that check the API."""

import functools
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs.checks import RANK, SIZE
from tfcluster.runtime import process_group

HALF_DTYPES = ("float16", "bfloat16")
FLOATS = (*HALF_DTYPES, "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
OPS = {
    "average": tfc.Average,
    "sum": tfc.Sum,
    "min": tfc.Min,
    "max": tfc.Max,
    "product": tfc.Product,
}


def of_rank(rank, shape, dtype="float32"):
    """The input of a rank. Every rank can compute the inputs of all ranks."""
    generator = np.random.default_rng([rank, *shape])
    if dtype == "bool":
        return generator.random(shape) < 0.6
    low = 0 if dtype.startswith("u") else -3
    whole = generator.integers(low, 4, shape)
    if dtype in INTEGERS:
        return whole.astype(dtype)
    if dtype in COMPLEX:
        return (whole + 1j * whole[::-1] / 2).astype(dtype)
    return tf.constant(whole / 4, tf.as_dtype(dtype)).numpy()


def combined(op, parts):
    """The ranks' arrays reduced by numpy: the expected result."""
    wide = [np.asarray(part) for part in parts]
    dtype = wide[0].dtype
    if dtype == np.bool_:
        or_ = op in ("sum", "max")
        return functools.reduce(np.logical_or if or_ else np.logical_and, wide)
    if dtype.name in HALF_DTYPES:
        wide = [part.astype("float32") for part in wide]
    if op in ("average", "sum"):
        kind = dtype.kind in "iu"
        total = functools.reduce(
            np.add, [part.astype("int64") if kind else part for part in wide]
        )
        if op == "average":
            total = total // SIZE if kind else total / SIZE
    else:
        reduction = {"min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
        total = functools.reduce(reduction, wide)
    return total.astype(dtype)


def same(found, expected, dtype):
    found = tf.convert_to_tensor(found)
    assert found.dtype.name == dtype, (found.dtype, dtype)
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6}.get(dtype, 1e-12)
    if dtype in (*INTEGERS, "bool"):
        np.testing.assert_array_equal(found.numpy(), expected)
        return
    wide = "complex128" if dtype in COMPLEX else "float64"
    np.testing.assert_allclose(
        found.numpy().astype(wide), expected.astype(wide), tolerance, tolerance
    )


def pairs():
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, "bool"):
        for name in OPS:
            if dtype == "bool" and name == "average":
                continue
            if dtype in COMPLEX and name in ("min", "max"):
                continue
            yield dtype, name


def refuses(kind, words, act):
    with pytest.raises(kind, match=re.escape(words)):
        act()


def exchanges(act, *args):
    """The number of exchanges that a call makes."""
    ranks = process_group.group()
    with mock.patch.object(ranks, "exchange", wraps=ranks.exchange) as counted:
        act(*args)
    return counted.call_count


OPERATIONS = {
    "average": lambda x: tfc.allreduce(x),
    "sum": lambda x: tfc.allreduce(x, op=tfc.Sum),
    "scaled": lambda x: tfc.allreduce(x, prescale_factor=0.5, postscale_factor=3.0),
    "grouped": lambda x: tf.stack(tfc.grouped_allreduce([x, 2 * x])),
    "slices": lambda x: (
        tfc.allreduce(tf.IndexedSlices(x, tf.range(2 * SIZE + 1))).values
    ),
    "allgather": lambda x: tfc.allgather(x),
    "columns": lambda x: tfc.allgather(x, axis=1),
    "uneven": lambda x: tfc.allgather(x[: RANK + 1]),
    "broadcast": lambda x: tfc.broadcast(x, SIZE - 1),
    "even": lambda x: tfc.alltoall(x[: 2 * SIZE]),
    "alltoall": lambda x: tfc.alltoall(x, [(RANK + r) % 3 for r in range(SIZE)])[0],
    "reducescatter": lambda x: tfc.reducescatter(x),
    "parts": lambda x: tfc.reducescatter(x, op=tfc.Sum),
    "twice": lambda x: tfc.allgather(tfc.allreduce(x) * x),
}

HOROVODS = {
    **dict.fromkeys(("allgather", "columns", "uneven", "broadcast", "twice"), 1 / SIZE),
    **dict.fromkeys(("reducescatter", "parts"), SIZE),
}
"""Horovod's gradient, as a multiple of the derivative of the sum over all ranks."""

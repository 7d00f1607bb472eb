"""The buffer pool reuses memory, but only when nothing refers to it any more."""

from __future__ import annotations

import numpy as np
import pytest

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool

COUNT = 100_000


def address(array: Array) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again() -> None:
    pool = Pool()
    first = pool.empty(COUNT, "float32")
    where = address(first)
    del first
    again = pool.empty(COUNT * 2, "int16")
    assert address(again) == where
    assert again.dtype == "int16"
    assert len(again) == COUNT * 2


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array,
        lambda array: array[5:7],
        lambda array: array.reshape(2, -1)[1].view("uint8"),
        lambda array: array.data,
        lambda array: memoryview(array)[3:4],
    ],
    ids=["all", "slice", "view", "buffer", "part of a buffer"],
)
def test_memory_of_which_somebody_has_a_part_is_left_alone(part: object) -> None:
    pool = Pool()
    first = pool.empty(COUNT, "float32")
    first[:] = 1
    kept = part(first)  # type: ignore[operator] # a list of functions
    where = address(first)
    del first
    others = [pool.empty(COUNT, "float32") for _ in range(3)]
    assert where not in map(address, others)
    for other in others:
        other[:] = 2
    assert (np.asarray(kept).view("float32") == 1).all()


@pytest.mark.parametrize("count", [0, 1, 1000, COUNT])
def test_it_begins_where_tensorflow_wants_it(count: int) -> None:
    array = Pool().empty(count, "float64")
    assert array.shape == (count,)
    if count:
        assert address(array) % ALIGNMENT == 0


def test_what_was_much_for_once_is_let_go() -> None:
    pool = Pool()
    several = [pool.empty(COUNT, "float32") for _ in range(20)]
    assert len(set(map(address, several))) == 20
    del several
    for _ in range(20):
        pool.empty(COUNT, "float32")
    assert sum(map(len, pool._bases.values())) <= 5


def test_ever_other_sizes_do_not_fill_memory() -> None:
    pool = Pool()
    for more in range(100):
        pool.empty(COUNT, "uint8")
        pool.empty(COUNT + more, "float32")
    assert COUNT in pool._bases
    assert len(pool._bases) <= 16

"""Ragged rows, half precision and a common order of operations.

The ranks are threads that are connected by real sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.ranks import as_threads, results
from tfcluster.runtime.collective import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    ReduceOp,
    Signature,
)
from tfcluster.runtime.collective.collectives import (
    combine,
    reduce_arrays,
)
from tfcluster.runtime.collective.packing import part_bounds, reduce_half_precision
from tfcluster.runtime.exchange.negotiation import Negotiator

SIGNATURE = Signature("test")


@given(st.integers(0, 1000), st.integers(1, 50))
def test_parts_are_even_and_the_first_have_more(count: int, size: int) -> None:
    bounds = part_bounds(count, size)
    parts = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(parts)) == (0, count, size)
    assert sorted(parts, reverse=True) == list(parts)
    assert parts.max() - parts.min() <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_halves_are_summed_up_in_float32(size: int) -> None:
    """2048 + 1 is 2048 in float16: ones that are added one by one would be lost."""

    def act(group: Group) -> list[float]:
        own = np.array([2048 if group.rank == 0 else 1, 1e-7, 60000], np.float16)
        with group.exchange(SIGNATURE) as call:
            total = reduce_half_precision(call.transport, own, ReduceOp.SUM)
            largest = reduce_half_precision(call.transport, own, ReduceOp.MAX)
            mean = reduce_half_precision(call.transport, own, ReduceOp.SUM, size)
        assert total.dtype == largest.dtype == mean.dtype == np.float16
        assert largest[0] == 2048
        assert mean[2] == 60000
        return [float(number) for number in total]

    for total in results(as_threads(size, act)):
        assert total[0] == np.float16(2048 + size - 1)
        assert (total[2] == np.inf) == (size > 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "float32"])
def test_averages_of_small_integers_do_not_overflow(dtype: str) -> None:
    def act(group: Group) -> list[float]:
        own = np.array([120 - group.rank, 0, group.rank], dtype)
        (mean,), _ = combine(group, [own], [], ReduceOp.AVERAGE, SIGNATURE)
        assert mean.dtype == own.dtype
        return [float(number) for number in mean]

    whole = dtype != "float32"
    for mean in results(as_threads(4, act)):
        assert mean == [118 if whole else 118.5, 0, 1 if whole else 1.5]


def one(group: Group, name: str) -> float:
    (total,) = reduce_arrays(
        group, [np.ones(1)], ReduceOp.SUM, Signature(f"exchange {name}")
    )
    return float(total[0])


def in_background(acts: list[Callable[[], float]]) -> list[float | Exception]:
    """Call functions in threads of one rank; what each of them returned or raised."""
    outcomes: list[float | Exception] = [TimeoutError()] * len(acts)

    def run(index: int) -> None:
        try:
            outcomes[index] = acts[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads_of_all_ranks_find_a_common_order(size: int) -> None:
    names = [f"e{i}" for i in range(12)]

    def act(group: Group) -> list[float | Exception]:
        order = Negotiator(group)
        mine = names[group.rank :] + names[: group.rank]
        if group.rank % 2:
            mine.reverse()
        found = in_background(
            [
                lambda name=name: order.run(name, lambda: one(group, name))  # type: ignore[misc]
                for name in mine
            ]
        )
        # The same operation repeatedly, also several at a time.
        return found + in_background(
            [lambda: order.run("same", lambda: one(group, "same"))] * 5
        )

    for found in results(as_threads(size, act)):
        assert found == [float(size)] * 17


def test_one_thread_that_waits_does_not_keep_the_others_back() -> None:
    """Rank 1 begins the first exchange only after it has finished the second."""

    def act(group: Group) -> list[float | Exception]:
        order = Negotiator(group)
        second = threading.Event()

        def late() -> float:
            if group.rank == 1:
                assert second.wait(10)
            return float(order.run("a", lambda: one(group, "a")))

        def early() -> float:
            found = float(order.run("b", lambda: one(group, "b")))
            second.set()
            return found

        return in_background([late, early])

    for found in results(as_threads(2, act)):
        assert found == [2.0, 2.0]


def test_ranks_that_never_meet_give_up_together() -> None:
    def act(group: Group) -> str:
        order = Negotiator(group, deadline_s=0.2)
        with pytest.raises(CollectiveTimeoutError) as raised:
            order.run(f"e{group.rank}", lambda: 0.0)
        return str(raised.value)

    for error in results(as_threads(3, act)):
        assert "rank 0: e0; rank 1: e1; rank 2: e2" in error


def test_what_an_exchange_raises_comes_to_its_own_thread() -> None:
    def act(group: Group) -> list[float | Exception]:
        order = Negotiator(group)

        def wrong() -> float:
            raise ValueError("wrong")

        found = in_background([lambda: order.run("a", wrong)])
        return found + in_background(
            [lambda: order.run("b", lambda: one(group, f"of {group.rank}"))]
        )

    for found in results(as_threads(2, act)):
        assert isinstance(found[0], ValueError)
        assert isinstance(found[1], CollectiveMismatchError)

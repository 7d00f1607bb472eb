"""Means of gradients between hosts: rounding, feedback of its errors, in a thread.

Ranks are threads over real sockets, without TensorFlow. Ranks with equal host keys
share memory; others count as ranks of another host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.runtime.ranks import as_threads, results
from tfcluster.runtime.collective import (
    CollectiveError,
    CollectiveMismatchError,
    Group,
    Signature,
)
from tfcluster.runtime.collective.background_exchange import BackgroundExchange
from tfcluster.runtime.collective.buckets import Item, in_reverse_order
from tfcluster.runtime.collective.collectives import meet
from tfcluster.runtime.collective.gradient_mean import Available, MeanOptions, mean_of
from tfcluster.runtime.collective.rounding import Residuals, Rounding
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array

SIGNATURE = Signature("gradients")
DTYPES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""By dtype: the largest relative error of rounding."""
HOSTS = [["", ""], ["", "", ""], ["a", "a", "b"], ["a", "b", "a", "b", "c"]]
LENGTHS = [0, 1, 5, 4097, 300_001]


def gradients(rank: int, dtype: str = "float32") -> list[Array]:
    random = np.random.default_rng(rank)
    return [random.normal(size=length).astype(dtype) for length in LENGTHS]


def mean(group: Group, arrays: Sequence[Array], options: MeanOptions) -> list[Array]:
    """The mean of ``arrays``, weighted by rank + 1."""
    available = Available(arrays, [])
    return mean_of(group, available, options, group.rank + 1.0, SIGNATURE).dense


def exact(size: int, of: Callable[[int], list[Array]]) -> list[Array]:
    weights = np.arange(1.0, size + 1)
    columns = zip(*(of(rank) for rank in range(size)), strict=True)
    return [np.average(np.array(c, "float64"), 0, weights=weights) for c in columns]


@pytest.mark.parametrize("host_keys", HOSTS, ids="-".join)
def test_buckets_have_the_mean_by_weights(host_keys: list[str]) -> None:
    def act(group: Group) -> list[Array]:
        return mean(group, gradients(group.rank), MeanOptions(1 << 12))

    found = results(as_threads(len(host_keys), act, host_keys))
    for place, expected in enumerate(exact(len(host_keys), gradients)):
        assert len({ranks[place].tobytes() for ranks in found}) == 1
        np.testing.assert_allclose(found[0][place], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("host_keys", HOSTS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_dtype", ["float32", "float64"])
def test_rounded_means_are_close_and_equal_on_all_ranks(
    host_keys: list[str], dtype: str, own_dtype: str
) -> None:
    def own(rank: int) -> list[Array]:
        return gradients(rank, own_dtype)

    def act(group: Group) -> list[Array]:
        return mean(group, own(group.rank), MeanOptions(rounding=Rounding(dtype)))

    found = results(as_threads(len(host_keys), act, host_keys))
    for place, expected in enumerate(exact(len(host_keys), own)):
        assert len({ranks[place].tobytes() for ranks in found}) == 1
        assert found[0][place].dtype == own_dtype
        # Once per contribution and once for the sum, whose terms are below 5.
        atol = 10 * DTYPES[dtype]
        np.testing.assert_allclose(found[0][place], expected, rtol=0, atol=atol)
    assert not np.array_equal(found[0][-1], expected), "nothing was rounded"


def test_nothing_is_rounded_within_a_host() -> None:
    def act(group: Group) -> list[Array]:
        rounded = MeanOptions(rounding=Rounding("bfloat16"))
        found = mean(group, gradients(group.rank), rounded)
        return [*found, *mean(group, gradients(group.rank), MeanOptions())]

    for found in results(as_threads(2, act, ["a", "a"])):
        for one, other in zip(found[:5], found[5:], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("host_keys", [["", ""], ["a", "a", "b"]], ids="-".join)
def test_a_rank_without_rows_counts_as_zeros(host_keys: list[str]) -> None:
    def act(group: Group) -> Array:
        last = group.rank == group.size - 1
        own = np.full(20_000, np.nan if last else 2.0, "float32")
        options = MeanOptions(rounding=Rounding("float16"))
        weight = 0.0 if last else 3.0
        found = mean_of(group, Available([own], []), options, weight, SIGNATURE)
        return found.dense[0]

    for found in results(as_threads(len(host_keys), act, host_keys)):
        np.testing.assert_array_equal(found, np.full(20_000, 2.0, "float32"))


def test_float16_is_that_of_numpy() -> None:
    random = np.random.default_rng(3)
    values = [
        random.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32),
        (random.normal(size=100_000) * 1e-5).astype("float32"),
        np.array([0.0, -0.0, 65504, 65519.9, 65520, 1e30, np.inf, np.nan], "float32"),
        np.float32(2.0) ** np.arange(-30, 18, dtype="float32"),
        np.float32(1 + 2.0**-11) * np.float32(2.0) ** np.arange(-30, 16, dtype="f4"),
        np.array([], "float32"),
    ]
    rounding = Rounding("float16")
    for each in (*values, *(-one for one in values)):
        found, back = rounding.empty(len(each)), np.empty_like(each)
        rounding.to_half(each, found)
        with np.errstate(all="ignore"):
            expected = each.astype(np.float16)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
        rounding.to_float(found, back)
        np.testing.assert_array_equal(back, expected.astype(np.float32))


STEPS = 40


def drift(host_keys: list[str], *, feeds_back: bool) -> float:
    """How far the sum of many rounded means is from the sum of the exact ones.

    The gradients are constant, and the shares of the rows differ in every step.
    """
    size, rounding = len(host_keys), Rounding("bfloat16")

    def act(group: Group) -> Array:
        own = 1.0 + np.random.default_rng(group.rank).random(3000, "float32")
        options = MeanOptions(
            rounding=rounding, residuals=Residuals() if feeds_back else None
        )
        total = np.zeros(3000)
        for step in range(STEPS):
            weight = float((step + group.rank) % size)
            available = Available([own], [])
            total += mean_of(group, available, options, weight, SIGNATURE).dense[0]
        return total

    found = results(as_threads(size, act, host_keys))
    assert len({total.tobytes() for total in found}) == 1
    own = [1.0 + np.random.default_rng(r).random(3000, "float32") for r in range(size)]
    weights = [[(step + rank) % size for rank in range(size)] for step in range(STEPS)]
    expected = sum(np.average(own, 0, weights=w) for w in weights)
    return float(np.abs(found[0] - expected).max())


@pytest.mark.parametrize("host_keys", [["", "", ""], ["a", "a", "b"]], ids="-".join)
def test_errors_that_are_fed_back_do_not_add_up(host_keys: list[str]) -> None:
    # One number below 2 is rounded by at most 2**-8, on each of three ranks and again.
    assert drift(host_keys, feeds_back=True) < 4 * 2.0**-8
    assert drift(host_keys, feeds_back=False) > 8 * 2.0**-8


def test_an_infinite_gradient_is_forgotten() -> None:
    def act(group: Group) -> tuple[Array, Array]:
        options = MeanOptions(rounding=Rounding("float16"), residuals=Residuals())
        wrong = np.full(5000, np.inf if group.rank else 1e30, "float32")
        first = mean(group, [wrong], options)[0]
        return first, mean(group, [np.ones(5000, "float32")], options)[0]

    for first, second in results(as_threads(2, act, ["", ""])):
        assert np.isinf(first).all()
        np.testing.assert_array_equal(second, np.ones(5000, "float32"))


# In a thread.


def items(arrays: Sequence[Array]) -> list[Item]:
    return [Item(str(array.dtype), array.nbytes) for array in arrays]


def begun(
    group: Group, arrays: Sequence[Array], options: MeanOptions, late: int = 0
) -> BackgroundExchange:
    what = items(arrays)
    return BackgroundExchange(group, what, late, options, group.rank + 1.0, SIGNATURE)


def ended(exchange: BackgroundExchange, arrays: Sequence[Array]) -> None:
    """Hand over the bucket of the first array, and wait for the end."""
    exchange.hand_over((0,), arrays)
    exchange.result([], [])


@pytest.mark.parametrize("host_keys", [["", ""], ["a", "a", "b"]], ids="-".join)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_is_handed_over_bit_by_bit_has_the_same_mean(
    host_keys: list[str], dtype: str | None
) -> None:
    options = MeanOptions(1 << 12, Rounding(dtype) if dtype else None)

    def act(group: Group) -> tuple[list[Array], list[Array]]:
        arrays = gradients(group.rank)
        slices = [Slices(np.ones((2, 3), "float32"), np.array([1, group.rank]))]
        available = Available(arrays, slices, late=1)
        once = mean_of(group, available, options, group.rank + 1.0, SIGNATURE)
        exchange = begun(group, arrays, options, late=1)
        buckets = options.buckets(items(arrays), late=1)
        assert [4] in [list(bucket) for bucket in buckets]
        for bucket in buckets:
            if bucket != (4,):
                exchange.hand_over(bucket, [arrays[place] for place in bucket])
        parts = exchange.result(arrays[4:], slices)
        assert group.background is None
        np.testing.assert_array_equal(parts.sparse[0].values, once.sparse[0].values)
        return once.dense, parts.dense

    for once, parts in results(as_threads(len(host_keys), act, host_keys)):
        for one, other in zip(once, parts, strict=True):
            assert one.tobytes() == other.tobytes()


def test_means_arrive_before_the_last_gradients_are_there() -> None:
    def act(group: Group) -> tuple[list[Array], tuple[bytes, ...]]:
        first, second = gradients(group.rank)[3:]
        exchange = begun(group, [first, second], MeanOptions(1))
        last, *others = MeanOptions(1).buckets(items([first, second]), 0)[::-1]
        early: list[Array] = []
        for bucket in others:
            exchange.hand_over(bucket, [(first, second)[place] for place in bucket])
            early += exchange.means(bucket)
        notes = exchange.notes()
        exchange.hand_over(last, [(first, second)[place] for place in last])
        whole = exchange.result([], []).dense
        places = [place for bucket in others for place in bucket]
        for place, mean in zip(places, early, strict=True):
            np.testing.assert_array_equal(mean, whole[place])
        return early, notes

    for early, notes in results(as_threads(2, act, ["", ""])):
        assert early
        assert len(notes) == 2


def test_whoever_waits_for_means_gets_the_error() -> None:
    def act(group: Group) -> str:
        arrays = [np.ones(9000, "float32"), np.ones(9000, "float32")]
        signature = Signature("gradients", (f"of rank {group.rank}",))
        exchange = BackgroundExchange(
            group, items(arrays), 0, MeanOptions(1), 1.0, signature
        )
        with pytest.raises(CollectiveMismatchError):
            exchange.notes()
        with pytest.raises(CollectiveMismatchError) as caught:
            exchange.means((1,))
        return str(caught.value)

    here, there = results(as_threads(2, act, ["", ""]))
    assert here == there


def test_ranks_see_who_is_still_computing() -> None:
    sent = threading.Event()
    seen = threading.Event()

    def act(group: Group) -> tuple[bool, int]:
        arrays = [np.ones(9000, "float32"), np.ones(9000, "float32")]
        meet(group, Signature("before"))
        exchange = begun(group, arrays, MeanOptions(1))
        exchange.hand_over((1,), [arrays[1]])
        if group.rank == 1:
            assert sent.wait(10)
            deadline = time.monotonic() + 10
            # The first bucket has been taken, and then the second is waited for.
            while exchange._arrivals.has((1,)) or group._progress().inside:
                assert time.monotonic() < deadline
            found = group._progress()
            seen.set()
        else:
            exchange.hand_over((0,), [arrays[0]])
            sent.set()
            assert seen.wait(10)
            found = group._progress()
        if group.rank == 1:
            exchange.hand_over((0,), [arrays[0]])
        exchange.result([], [])
        return found.inside, found.number

    here, there = results(as_threads(2, act, ["", ""]))
    assert here == (True, 2)
    assert there == (False, 1)


def test_a_step_that_breaks_off_ends_the_group_and_the_thread() -> None:
    def act(group: Group) -> str:
        arrays = [np.ones(9000, "float32"), np.ones(9000, "float32")]
        exchange = begun(group, arrays, MeanOptions(1))
        exchange.hand_over((1,), [arrays[1]])
        if group.rank == 1:
            with pytest.raises(CollectiveError) as caught:
                meet(group, Signature("the next thing"))
        else:
            with pytest.raises(CollectiveError) as caught:
                ended(exchange, arrays[:1])
        exchange._thread.join(10)
        assert not exchange._thread.is_alive()
        return str(caught.value)

    here, there = results(as_threads(2, act, ["", ""]))
    assert "rank 1 has left" in here
    assert "the step ended before all of its gradients were computed" in there
    assert "exchange 1: gradients" in there


def test_a_group_that_is_closed_leaves_no_thread() -> None:
    def act(group: Group) -> bool:
        exchange = begun(group, [np.ones(9000, "float32")], MeanOptions())
        group.close("it is over")
        exchange._thread.join(10)
        return exchange._thread.is_alive()

    assert results(as_threads(2, act, ["", ""])) == [False, False]


def test_a_mismatch_leaves_the_ranks_in_step() -> None:
    def act(group: Group) -> str:
        arrays = [np.ones(9000, "float32")]
        signature = Signature("gradients", (f"of rank {group.rank}",))
        exchange = BackgroundExchange(
            group, items(arrays), 0, MeanOptions(), 1.0, signature
        )
        with pytest.raises(CollectiveMismatchError) as caught:
            ended(exchange, arrays)
        meet(group, Signature("the next thing"))
        return str(caught.value)

    here, there = results(as_threads(2, act, ["", ""]))
    assert here == there
    assert "rank 0: of rank 0; rank 1: of rank 1" in here


def test_buckets_come_in_the_reverse_order() -> None:
    sizes = [10, 90, 5, 20, 80, 7]
    what = [Item("float32", size) for size in sizes]
    # 80 and 90 go alone; the others are closed once they exceed 25 bytes.
    assert in_reverse_order(what, 25, 50) == [(4,), (5, 3), (1,), (2, 0)]
    assert in_reverse_order([], 25, 50) == []

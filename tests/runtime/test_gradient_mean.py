"""Means of gradients, exact and rounded between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.runtime.ranks import as_threads, results
from tfcluster.runtime.collective import Group, ReduceOp, Signature
from tfcluster.runtime.collective.packing import reduced
from tfcluster.runtime.collective.rounding import Residual, Rounding
from tfcluster.runtime.collective.transports.base import Array

SIGNATURE = Signature("gradients")
DTYPES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""By dtype: the largest relative error of rounding."""
HOSTS = [["", ""], ["", "", ""], ["a", "a", "b"], ["a", "b", "a", "b", "c"]]
LENGTHS = [0, 1, 5, 4097, 300_001]


def gradients(rank: int, dtype: str = "float32") -> list[Array]:
    random = np.random.default_rng(rank)
    return [random.normal(size=length).astype(dtype) for length in LENGTHS]


def mean(
    group: Group,
    arrays: Sequence[Array],
    rounding: Rounding | None = None,
    weight: float | None = None,
    residual: Residual | None = None,
) -> list[Array]:
    """The mean of ``arrays``, weighted by ``weight`` or rank + 1."""
    weight = group.rank + 1.0 if weight is None else weight
    with group.exchange(SIGNATURE, weight) as call:
        if rounding is None:
            return reduced(call, arrays, ReduceOp.SUM, scale=call.share)
        found = [np.empty_like(array) for array in arrays]
        for total, array in zip(found, arrays, strict=True):
            if total.size:
                call.transport.allreduce_rounded(
                    total, array, call.shares, rounding, residual
                )
        return found


def exact(size: int, of: Callable[[int], list[Array]]) -> list[Array]:
    weights = np.arange(1.0, size + 1)
    columns = zip(*(of(rank) for rank in range(size)), strict=True)
    return [np.average(np.array(c, "float64"), 0, weights=weights) for c in columns]


@pytest.mark.parametrize("host_keys", HOSTS, ids="-".join)
def test_means_are_by_weights(host_keys: list[str]) -> None:
    def act(group: Group) -> list[Array]:
        return mean(group, gradients(group.rank))

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
        return mean(group, own(group.rank), Rounding(dtype))

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
        found = mean(group, gradients(group.rank), Rounding("bfloat16"))
        return [*found, *mean(group, gradients(group.rank))]

    for found in results(as_threads(2, act, ["a", "a"])):
        for one, other in zip(found[:5], found[5:], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("host_keys", [["", ""], ["a", "a", "b"]], ids="-".join)
def test_a_rank_without_rows_counts_as_zeros(host_keys: list[str]) -> None:
    def act(group: Group) -> Array:
        last = group.rank == group.size - 1
        own = np.full(20_000, np.nan if last else 2.0, "float32")
        return mean(group, [own], Rounding("float16"), 0.0 if last else 3.0)[0]

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
        residual = Residual() if feeds_back else None
        total = np.zeros(3000)
        for step in range(STEPS):
            weight = float((step + group.rank) % size)
            total += mean(group, [own], rounding, weight, residual)[0]
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
        rounding, residual = Rounding("float16"), Residual()
        wrong = np.full(5000, np.inf if group.rank else 1e30, "float32")
        first = mean(group, [wrong], rounding, residual=residual)[0]
        right = np.ones(5000, "float32")
        return first, mean(group, [right], rounding, residual=residual)[0]

    for first, second in results(as_threads(2, act, ["", ""])):
        assert np.isinf(first).all()
        np.testing.assert_array_equal(second, np.ones(5000, "float32"))

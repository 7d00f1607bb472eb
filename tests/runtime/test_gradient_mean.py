"""Sums of gradients, exact and rounded between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.kit.ranks import as_threads, results
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


def total(
    group: Group,
    arrays: Sequence[Array],
    rounding: Rounding | None = None,
    residual: Residual | None = None,
) -> list[Array]:
    """The sum of the ranks' ``arrays``."""
    with group.exchange(SIGNATURE) as call:
        if rounding is None:
            return reduced(call, arrays, ReduceOp.SUM)
        found = [array.copy() for array in arrays]
        for array in found:
            if array.size:
                call.transport.allreduce_rounded(array, rounding, residual)
        return found


def exact(size: int, of: Callable[[int], list[Array]]) -> list[Array]:
    columns = zip(*(of(rank) for rank in range(size)), strict=True)
    return [np.sum(np.array(c, "float64"), 0) for c in columns]


@pytest.mark.parametrize("host_keys", HOSTS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_dtype", ["float32", "float64"])
def test_rounded_sums_are_close_and_equal_on_all_ranks(
    host_keys: list[str], dtype: str, own_dtype: str
) -> None:
    def own(rank: int) -> list[Array]:
        return gradients(rank, own_dtype)

    def act(group: Group) -> list[Array]:
        return total(group, own(group.rank), Rounding(dtype))

    found = results(as_threads(len(host_keys), act, host_keys))
    for place, expected in enumerate(exact(len(host_keys), own)):
        assert len({ranks[place].tobytes() for ranks in found}) == 1
        assert found[0][place].dtype == own_dtype
        # Once per contribution and once for the sum, whose terms are below 5.
        atol = 10 * len(host_keys) * DTYPES[dtype]
        np.testing.assert_allclose(found[0][place], expected, rtol=0, atol=atol)
    assert not np.array_equal(found[0][-1], expected), "nothing was rounded"


def test_nothing_is_rounded_within_a_host() -> None:
    def act(group: Group) -> list[Array]:
        found = total(group, gradients(group.rank), Rounding("bfloat16"))
        return [*found, *total(group, gradients(group.rank))]

    for found in results(as_threads(2, act, ["a", "a"])):
        for one, other in zip(found[:5], found[5:], strict=True):
            np.testing.assert_array_equal(one, other)


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
    """How far the sum of many rounded sums is from that of the exact ones, relatively.

    The gradients are constant.
    """
    size, rounding = len(host_keys), Rounding("bfloat16")

    def act(group: Group) -> Array:
        own = 1.0 + np.random.default_rng(group.rank).random(3000, "float32")
        residual = Residual() if feeds_back else None
        found = np.zeros(3000)
        for _ in range(STEPS):
            found += total(group, [own], rounding, residual)[0]
        return found / size

    found = results(as_threads(size, act, host_keys))
    assert len({each.tobytes() for each in found}) == 1
    own = [1.0 + np.random.default_rng(r).random(3000, "float32") for r in range(size)]
    expected = STEPS * np.mean(own, 0, dtype=np.float64)
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
        first = total(group, [wrong], rounding, residual)[0]
        right = np.ones(5000, "float32")
        return first, total(group, [right], rounding, residual)[0]

    for first, second in results(as_threads(2, act, ["", ""])):
        assert np.isinf(first).all()
        np.testing.assert_array_equal(second, np.full(5000, 2, "float32"))

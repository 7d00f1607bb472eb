"""Reduce-scatter and all-gather of parts that ranks choose, among threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from tests.kit.ranks import as_threads, results
from tfcluster.runtime.collective import Group, ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.collective.packing import reduced
from tfcluster.runtime.collective.scattering import (
    allgathered,
    reduce_scattered,
    reduce_scattered_alone,
)
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.net.buffer_pool import ALIGNMENT

ROWS = (3, 40_001, 5)
"""Small arrays, and one of several rounds in shared memory."""


def terms_of(rank: int) -> list[Array]:
    """Numbers whose sum depends on the order of the additions, of two dtypes."""
    random = np.random.default_rng(rank)
    scales = 10.0 ** random.integers(-3, 4, (max(ROWS), 7))
    values = random.normal(size=(max(ROWS), 7)) * scales
    dtypes = (np.float32, np.float32, np.float64)
    return [values[:n].astype(d) for n, d in zip(ROWS, dtypes, strict=True)]


def part(array: Array, rank: int, size: int) -> Array:
    """A rank's rows: not those that an all-reduce gives to it."""
    first, last = (
        len(array) * number**2 // size**2 for number in (size - rank - 1, size - rank)
    )
    return array[first:last]


HOSTS = pytest.mark.parametrize(
    "hosts", ["aa", "aaa", "aaaa", "ab", "abc", "aabb", "abab", "aabbcc", "abbacc"]
)
"""The host of each rank; a host's ranks need not be successive."""


@HOSTS
def test_a_reduce_scatter_has_the_bits_of_an_all_reduce(hosts: str) -> None:
    size = len(hosts)

    def act(group: Group) -> tuple[list[Array], list[Array]]:
        own = terms_of(group.rank)
        with group.exchange(Signature("whole")) as call:
            whole = [reduced(call, [term], ReduceOp.SUM)[0] for term in own]
        parts = [[part(term, rank, size) for term in own] for rank in range(size)]
        with group.exchange(Signature("parts")) as call:
            assert call.transport.scatters
            return whole, reduce_scattered(call, parts, ReduceOp.SUM)

    for rank, (whole, found) in enumerate(results(as_threads(size, act, list(hosts)))):
        for total, own in zip(whole, found, strict=True):
            assert own.dtype == total.dtype
            np.testing.assert_array_equal(own, part(total, rank, size))


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aabb", "abab", "abbacb"])
def test_terms_are_added_in_one_order_whatever_their_size(hosts: str) -> None:
    """Those of each host, in rank order, and then the hosts' sums."""
    ranks = range(len(hosts))
    of_hosts = [
        [terms_of(rank) for rank in ranks if hosts[rank] == host]
        for host in dict.fromkeys(hosts)
    ]

    def act(group: Group) -> tuple[list[Array], list[Array]]:
        own = terms_of(group.rank)
        small = reduce_arrays(group, own[:1], ReduceOp.SUM, Signature("small"))
        with group.exchange(Signature("all")) as call:
            return small, reduced(call, own, ReduceOp.SUM)

    expected = [
        sum_in_order([sum_in_order([term[i] for term in terms]) for terms in of_hosts])
        for i in range(len(ROWS))
    ]
    for small, found in results(as_threads(len(hosts), act, list(hosts))):
        np.testing.assert_array_equal(small[0], expected[0])
        for total, whole in zip(found, expected, strict=True):
            np.testing.assert_array_equal(total, whole)


def sum_in_order(terms: Sequence[Array]) -> Array:
    total: Array = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


@HOSTS
def test_parts_of_all_ranks_are_gathered(hosts: str) -> None:
    wholes, size = terms_of(0), len(hosts)
    shapes = [
        [part(whole, rank, size).shape for whole in wholes] for rank in range(size)
    ]

    def act(group: Group) -> list[list[Array]]:
        own = [part(whole, group.rank, size) for whole in wholes]
        with group.exchange(Signature("parts")) as call:
            return allgathered(call, own, shapes)

    for found in results(as_threads(size, act, list(hosts))):
        for rank, parts in enumerate(found):
            for own, whole in zip(parts, wholes, strict=True):
                np.testing.assert_array_equal(own, part(whole, rank, size))


@pytest.mark.parametrize("size", [2, 3])
def test_gathers_and_sums_in_a_row_do_not_overtake_each_other(size: int) -> None:
    """A rank that is ahead must not overwrite what another one still reads."""
    rows = 60_000
    shapes = [[(rows,), (rows,)]] * size

    def act(group: Group) -> list[str]:
        wrong = []
        for number in range(40):
            value = 10 * number + group.rank
            dtypes = (np.int64, np.float32)
            own: list[Array] = [np.full(rows, value, dtype) for dtype in dtypes]
            with group.exchange(Signature("a row of operations")) as call:
                (total,) = reduced(call, own[1:], ReduceOp.SUM)
                gathered = [allgathered(call, own, shapes) for _ in range(3)]
            for found in gathered:
                for rank, arrays in enumerate(found):
                    for array in arrays:
                        if not (array == 10 * number + rank).all():
                            wrong.append(f"round {number}: rank {rank}, {array.dtype}")
            if not (total == sum(10 * number + rank for rank in range(size))).all():
                wrong.append(f"round {number}: the sum")
        return wrong

    assert results(as_threads(size, act)) == [[]] * size


def test_hosts_with_unequal_numbers_of_ranks_do_not_scatter() -> None:
    def act(group: Group) -> bool:
        with group.exchange(Signature("anything")) as call:
            return call.transport.scatters

    assert results(as_threads(3, act, ["a", "a", "b"])) == [False] * 3


@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab", "abc"])
def test_one_array_is_scattered_where_it_lies(hosts: str) -> None:
    size = len(hosts)

    def act(group: Group) -> tuple[Array, Array, bool]:
        term = terms_of(group.rank)[1]
        before = term.copy()
        with group.exchange(Signature("whole")) as call:
            whole = reduced(call, [term], ReduceOp.SUM)[0]
        ends = [term.size * number**2 // size**2 for number in range(size + 1)]
        sizes = [end - start for start, end in pairwise(ends)]
        with group.exchange(Signature("part")) as call:
            own = reduce_scattered_alone(call, term, sizes, ReduceOp.SUM)
        expected = whole.reshape(-1)[ends[group.rank] : ends[group.rank + 1]]
        assert own.ctypes.data % ALIGNMENT == 0, "TensorFlow would copy it"
        return own, expected, np.array_equal(term, before)

    for own, expected, is_kept in results(as_threads(size, act, list(hosts))):
        np.testing.assert_array_equal(own, expected)
        assert is_kept

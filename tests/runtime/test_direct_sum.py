"""Direct sums over TCP sockets, plain and rounded, with one thread for each rank."""

from __future__ import annotations

import functools
import gc
import itertools
import socket
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfcluster.runtime.collective.float_coding import BLOCK, Coder
from tfcluster.runtime.collective.rounding import Residual, Rounding
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.collective.transports.block_streams import BlockSink
from tfcluster.runtime.collective.transports.direct_sum import (
    DirectSum,
    PlainTerms,
    RoundedTerms,
    gathering,
)
from tfcluster.runtime.collective.transports.multiplexed_sockets import (
    IncomingBytes,
    PeerSockets,
)
from tfcluster.runtime.collective.transports.shm_allreduce import even_bounds
from tfcluster.runtime.errors import CollectiveError, PeerLostError

TIMEOUT_S = 60.0


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


@pytest.fixture
def ends() -> Iterator[tuple[PeerSockets, socket.socket]]:
    """A rank's connections, with rank 1 as the only peer, and rank 1's end."""
    here, there = pair()
    sockets = PeerSockets({1: here})
    with there:
        yield sockets, there
    sockets.close()


def connected_sockets(size: int) -> list[PeerSockets]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        ends[one][other], ends[other][one] = pair()
    return [PeerSockets(connections) for connections in ends]


def with_sockets(size: int, act: Callable[[int, PeerSockets], Array]) -> list[Array]:
    """What ``act`` returns for each rank, and its connections."""
    sockets = connected_sockets(size)
    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(act, range(size), sockets))
    for each in sockets:
        each.close()
    return results


def vectors_of(size: int, count: int) -> list[Array]:
    """Numbers whose sum depends on the order of the additions."""
    random = np.random.default_rng(7)
    scales = 10.0 ** random.integers(-3, 4, (size, count))
    return list((random.normal(size=(size, count)) * scales).astype("float32"))


def uneven(count: int, size: int) -> list[int]:
    """The first part is empty, and the others get longer."""
    return [0, *(count * number**2 // (size - 1) ** 2 for number in range(size))]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in place"])
@pytest.mark.parametrize("count", [1, 1000, 5 * BLOCK + 7])
@pytest.mark.parametrize("coding", ["none", "all", "rank 0"])
@pytest.mark.parametrize("bounds_of", [even_bounds, uneven])
def test_terms_are_added_in_rank_order(
    size: int,
    apart: bool,
    count: int,
    coding: str,
    bounds_of: Callable[[int, int], list[int]],
) -> None:
    vectors, bounds = vectors_of(size, count), bounds_of(count, size)
    expected = functools.reduce(np.add, vectors)
    kept = [vector.copy() for vector in vectors]

    def reduce(rank: int, sockets: PeerSockets, *, gathers: bool) -> Array:
        source = vectors[rank] if apart else vectors[rank].copy()
        result = np.full_like(source, np.nan) if apart else source
        codes = coding == "all" or (coding == "rank 0" and rank == 0)
        terms = PlainTerms(result, source, np.add)
        given = (rank, range(size), bounds, terms, Coder())
        ends = DirectSum(*given, codes=codes, gathers=gathers).ends()
        sockets.transfer(*ends, TIMEOUT_S)
        return result

    for result in with_sockets(size, functools.partial(reduce, gathers=True)):
        np.testing.assert_array_equal(result, expected)
    parts = with_sockets(size, functools.partial(reduce, gathers=False))
    for part, (start, end) in zip(parts, itertools.pairwise(bounds), strict=True):
        np.testing.assert_array_equal(part[start:end], expected[start:end])
        if apart:  # Nothing else is written.
            assert np.isnan(part[:start]).all()
            assert np.isnan(part[end:]).all()
    np.testing.assert_array_equal(vectors, kept)

    def gather(rank: int, sockets: PeerSockets) -> Array:
        given = (rank, range(size), bounds, parts[rank], Coder())
        sockets.transfer(*gathering(*given, codes=coding == "all"), TIMEOUT_S)
        return parts[rank]

    for whole in with_sockets(size, gather):
        np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("ufunc", [np.minimum, np.maximum, np.multiply])
@pytest.mark.parametrize("dtype", ["int8", "uint64", "float64", "complex64"])
def test_other_operations_and_dtypes(ufunc: np.ufunc, dtype: str) -> None:
    vectors = [vector.astype(dtype) for vector in vectors_of(3, 1000)]

    def reduce(rank: int, sockets: PeerSockets) -> Array:
        result: Array = vectors[rank].copy()
        terms = PlainTerms(result, result, ufunc)
        given = (rank, range(3), even_bounds(1000, 3), terms, Coder())
        sockets.transfer(*DirectSum(*given, codes=True).ends(), TIMEOUT_S)
        return result

    one, two, three = vectors
    for result in with_sockets(3, reduce):
        np.testing.assert_array_equal(result, ufunc(ufunc(one, two), three))


def test_nothing_keeps_the_vectors() -> None:
    """Memory that only a cycle refers to could not be reused for the next sum."""
    vectors = [np.ones(1000, "float32") for _ in range(2)]
    bounds = even_bounds(1000, 2)

    def reduce(rank: int, sockets: PeerSockets) -> Array:
        vector, own = vectors[rank], (bounds[rank], bounds[rank + 1])
        rounding = Rounding("bfloat16")
        kinds = (
            PlainTerms(vector, vector, np.add),
            RoundedTerms(vector, own, 2, rounding, None),
        )
        for terms in kinds:
            given = (rank, range(2), bounds, terms, Coder())
            sockets.transfer(*DirectSum(*given, codes=True).ends(), TIMEOUT_S)
        return np.zeros(1)

    gc.disable()
    try:
        with_sockets(2, reduce)
        kept = [weakref.ref(vector) for vector in vectors]
        vectors.clear()
        assert [vector() for vector in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [3, BLOCK // 2 + 7])
def test_coding_does_not_change_rounded_sums(dtype: str, size: int, count: int) -> None:
    bounds = even_bounds(count, size)

    def summed(codes: bool) -> list[Array]:
        def reduce(rank: int, sockets: PeerSockets) -> Array:
            vector = np.random.default_rng(rank).normal(size=count).astype("float32")
            own = bounds[rank], bounds[rank + 1]
            terms = RoundedTerms(vector, own, size, Rounding(dtype), Residual())
            given = (rank, range(size), bounds, terms, Coder())
            sockets.transfer(*DirectSum(*given, codes=codes).ends(), TIMEOUT_S)
            return vector

        return with_sockets(size, reduce)

    plain, coded = summed(False), summed(True)
    for result in (*plain, *coded):
        np.testing.assert_array_equal(result, plain[0])


@pytest.mark.parametrize("length", [0, 5])
def test_a_block_of_an_impossible_length_ends_the_sum(
    ends: tuple[PeerSockets, socket.socket], length: int
) -> None:
    sockets, there = ends
    there.sendall(length.to_bytes(4, "big") + bytes(8))
    sink = BlockSink(1, [np.zeros(1, "float32")], lambda *_: None, Coder())
    with pytest.raises(CollectiveError, match=f"rank 1 announced {length} bytes of 4"):
        sockets.transfer([], [sink], TIMEOUT_S)


def test_a_message_in_drops_is_waited_for_to_its_end(
    ends: tuple[PeerSockets, socket.socket],
) -> None:
    sockets, there = ends
    message = bytes(range(256)) * 8192
    sink = IncomingBytes(1)

    def drip() -> None:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there.sendall(len(message).to_bytes(8, "big"))
        for start in range(0, len(message), 10_007):
            there.sendall(message[start : start + 10_007])

    with ThreadPoolExecutor(1) as thread:
        dripping = thread.submit(drip)
        sockets.transfer([], [sink], TIMEOUT_S)
        dripping.result()
    assert sink.data == message


def test_small_messages_wake_up_after_large_ones(
    ends: tuple[PeerSockets, socket.socket],
) -> None:
    sockets, there = ends
    for length in (3 << 20, 1, 0, 3 << 20, 100):
        sink = IncomingBytes(1)
        message = bytes(length)
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(there.sendall, length.to_bytes(8, "big") + message)
            sockets.transfer([], [sink], TIMEOUT_S)
            sending.result()
        assert sink.data == message


def test_a_rank_that_leaves_in_the_midst_of_a_message_is_noticed(
    ends: tuple[PeerSockets, socket.socket],
) -> None:
    sockets, there = ends
    there.sendall((1 << 20).to_bytes(8, "big") + bytes(1000))
    there.close()
    with pytest.raises(PeerLostError):
        sockets.transfer([], [IncomingBytes(1)], TIMEOUT_S)

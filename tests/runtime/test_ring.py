"""The ring and rounded sums over TCP sockets, with one thread for each rank."""

from __future__ import annotations

import gc
import itertools
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfcluster.runtime.collective.float_coding import BLOCK, Coder
from tfcluster.runtime.collective.rounding import Residual, Rounding
from tfcluster.runtime.collective.transports.block_streams import BlockSink
from tfcluster.runtime.collective.transports.multiplexed_sockets import (
    IncomingBytes,
    PeerSockets,
)
from tfcluster.runtime.collective.transports.ring import Ring
from tfcluster.runtime.collective.transports.rounded_sum import RoundedSum
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


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in place"])
@pytest.mark.parametrize("count", [1, 1000, 5 * BLOCK + 7])
@pytest.mark.parametrize("coding", ["none", "all", "rank 0"])
def test_every_rank_has_the_same_result(
    size: int, apart: bool, count: int, coding: str
) -> None:
    rng = np.random.default_rng(7)
    vectors = [rng.normal(size=count).astype("float32") for _ in range(size)]
    expected = sum(vector.astype("float64") for vector in vectors)
    kept = [vector.copy() for vector in vectors]
    sockets = connected_sockets(size)

    def reduce(rank: int) -> np.ndarray:
        source = vectors[rank]
        result = np.full_like(source, np.nan) if apart else source
        codes = coding == "all" or (coding == "rank 0" and rank == 0)
        ring = Ring(*(rank, range(size), result, np.add, source, Coder()), codes=codes)
        sockets[rank].transfer(*ring.ends(), TIMEOUT_S)
        return result

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(reduce, range(size)))
    for each in sockets:
        each.close()
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-6)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    if apart:
        np.testing.assert_array_equal(vectors, kept)


def test_nothing_keeps_the_vectors() -> None:
    """Memory that only a cycle refers to could not be reused for the next sum."""
    vectors = [np.ones(1000, "float32") for _ in range(2)]
    sockets = connected_sockets(2)

    def reduce(rank: int) -> None:
        vector = vectors[rank]
        exact = Ring(*(rank, range(2), vector, np.add, vector, Coder()), codes=True)
        sockets[rank].transfer(*exact.ends(), TIMEOUT_S)
        given = (vector, Rounding("bfloat16"), None, Coder())
        rounded = RoundedSum(rank, range(2), *given, codes=True)
        sockets[rank].transfer(*rounded.ends(), TIMEOUT_S)

    gc.disable()
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(reduce, range(2)))
        for each in sockets:
            each.close()
        kept = [weakref.ref(vector) for vector in vectors]
        vectors.clear()
        assert [vector() for vector in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [3, BLOCK // 2 + 7])
def test_coding_does_not_change_rounded_sums(dtype: str, size: int, count: int) -> None:
    def summed(codes: bool) -> list[np.ndarray]:
        sockets = connected_sockets(size)

        def reduce(rank: int) -> np.ndarray:
            vector = np.random.default_rng(rank).normal(size=count).astype("float32")
            given = (vector, Rounding(dtype), Residual(), Coder())
            total = RoundedSum(rank, range(size), *given, codes=codes)
            sockets[rank].transfer(*total.ends(), TIMEOUT_S)
            return vector

        with ThreadPoolExecutor(size) as threads:
            results = list(threads.map(reduce, range(size)))
        for each in sockets:
            each.close()
        return results

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

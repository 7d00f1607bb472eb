"""The ring over TCP sockets within this process, with one thread per rank."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfcluster.runtime.collective.transports.multiplexed_sockets import (
    IncomingBytes,
    PeerSockets,
)
from tfcluster.runtime.collective.transports.ring import _BLOCK_BYTES, Ring
from tfcluster.runtime.errors import PeerLostError

TIMEOUT_S = 60.0
BLOCK = _BLOCK_BYTES // 4
"""Number of float32 values in a block."""


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
def test_every_rank_has_the_same_result(size: int, apart: bool, count: int) -> None:
    rng = np.random.default_rng(7)
    vectors = [rng.normal(size=count).astype("float32") for _ in range(size)]
    expected = sum(vector.astype("float64") for vector in vectors)
    kept = [vector.copy() for vector in vectors]
    sockets = connected_sockets(size)

    def reduce(rank: int) -> np.ndarray:
        source = vectors[rank]
        result = np.full_like(source, np.nan) if apart else source
        ring = Ring(rank, range(size), result, np.add, source)
        sockets[rank].transfer(ring.sources, ring.sinks, TIMEOUT_S)
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

"""The host transport and groups that use it, over real sockets, without TensorFlow."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest

from tests.kit.ranks import (
    ROOT,
    TOKEN,
    as_threads,
    held_addresses,
    in_threads,
    results,
)
from tests.kit.time_limits import allow_s
from tfcluster.runtime.collective import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    ReduceOp,
    Signature,
)
from tfcluster.runtime.collective.collectives import (
    allgather_bytes,
    broadcast_bytes,
    meet,
    reduce_arrays,
)
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.net.rendezvous import (
    HandshakeError,
    Member,
    accept,
    dial,
    listen,
)

SIGNATURE = Signature("test")
HEADER_BYTES = 48
"""What each rank sends in every exchange."""
SIZES = [1, 2, 3, 4, 5]
# Near the limits of direct sending and of one block, and indivisible by rank counts.
LENGTHS = [0, 1, 3, 1000, 4097, 65537, 300_001]
# Ranks with the same host key share memory; those with "" share none.
HOST_KEYS = [
    [""],
    ["", ""],
    ["", "", "", "", ""],
    ["a", "a"],
    ["a", "a", "a", "a", "a"],
    ["a", "b", "a", "b"],
    ["a", "a", "", "b", "b"],
    ["a", "a", "a", "b", "b"],
]


def vector(rank: int, length: int, dtype: str) -> Array:
    """A vector of whole numbers, so that sums are exact in every dtype."""
    generator = np.random.default_rng([rank, length])
    return generator.integers(0, 9, length).astype(dtype)


@pytest.mark.parametrize("host_keys", HOST_KEYS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_sums_are_exact_for_every_length(host_keys: list[str], dtype: str) -> None:
    size = len(host_keys)

    def act(group: Group) -> list[Array]:
        return [
            reduce_arrays(
                group, [vector(group.rank, length, dtype)], ReduceOp.SUM, SIGNATURE
            )[0]
            for length in LENGTHS
        ]

    for found in results(as_threads(size, act, host_keys)):
        for length, array in zip(LENGTHS, found, strict=True):
            parts = [vector(rank, length, dtype) for rank in range(size)]
            np.testing.assert_array_equal(array, np.sum(parts, axis=0, dtype=dtype))
            assert array.dtype == dtype


@pytest.mark.parametrize(
    "host_keys", [host_keys for host_keys in HOST_KEYS if len(host_keys) > 2]
)
@pytest.mark.parametrize("length", [7, 1_000_003])
def test_every_rank_has_the_same_bits(host_keys: list[str], length: int) -> None:
    def act(group: Group) -> bytes:
        array = np.random.default_rng(group.rank).normal(size=length).astype("float32")
        return reduce_arrays(group, [array], ReduceOp.SUM, SIGNATURE)[0].tobytes()

    assert len(set(results(as_threads(len(host_keys), act, host_keys)))) == 1


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.MIN, np.minimum.reduce),
        (ReduceOp.MAX, np.maximum.reduce),
        (ReduceOp.PRODUCT, np.multiply.reduce),
    ],
)
def test_other_operations(op: ReduceOp, expected: Callable[..., Array]) -> None:
    def act(group: Group) -> Array:
        return reduce_arrays(
            group, [vector(group.rank, 20_000, "int64")], op, SIGNATURE
        )[0]

    want = expected([vector(rank, 20_000, "int64") for rank in range(3)])
    for found in results(as_threads(3, act)):
        np.testing.assert_array_equal(found, want)


def test_arrays_of_several_dtypes_keep_their_shapes() -> None:
    def act(group: Group) -> list[Array]:
        arrays = [
            np.ones((2, 3), "float32"),
            np.ones((), "int64"),
            np.ones((0, 4), "float32"),
            np.ones((5,), "float32"),
        ]
        return reduce_arrays(group, arrays, ReduceOp.SUM, SIGNATURE)

    for found in results(as_threads(3, act)):
        assert [array.shape for array in found] == [(2, 3), (), (0, 4), (5,)]
        assert all((array == 3).all() for array in found)


@pytest.mark.parametrize("host_keys", HOST_KEYS)
def test_small_arrays_travel_with_the_header(host_keys: list[str]) -> None:
    """One operation of the transport, whatever the dtypes; wrong ones are noticed."""
    size = len(host_keys)
    exact = [np.arange(5.0), np.arange(3), np.array([[1, 2], [3, np.inf]], np.float32)]

    def act(group: Group) -> tuple[list[Array], int]:
        meet(group, SIGNATURE)
        before = group.exchanged_bytes
        arrays = [array * (group.rank + 1) for array in exact]
        sums = reduce_arrays(group, arrays, ReduceOp.SUM, SIGNATURE)
        sent = group.exchanged_bytes - before
        with pytest.raises(CollectiveMismatchError) if size > 1 else nullcontext():
            more = [np.ones(1 + (group.rank == 0))]
            words = (f"{len(more[0])}",)
            reduce_arrays(group, more, ReduceOp.SUM, Signature("more", words))
        assert group.failure is None
        return sums, sent

    for sums, sent in results(as_threads(size, act, host_keys)):
        for found, array in zip(sums, exact, strict=True):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array * (size * (size + 1) // 2))
        assert sent == HEADER_BYTES + sum(array.nbytes for array in exact)


def test_small_means_are_those_of_large_arrays() -> None:
    def act(group: Group) -> list[Array]:
        array = np.arange(1e5) + 0.1 * group.rank
        small = reduce_arrays(group, [array[:100]], ReduceOp.AVERAGE, SIGNATURE)
        large = reduce_arrays(group, [array], ReduceOp.AVERAGE, SIGNATURE)
        return [small[0], large[0][:100]]

    for small, large in results(as_threads(2, act)):
        np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_gets_what_is_for_it(size: int) -> None:
    def words(sender: int, receiver: int) -> bytes:
        return f"{sender} to {receiver};".encode() * (receiver * 1000)

    def act(group: Group) -> list[bytes]:
        parts = [words(group.rank, peer) for peer in range(size)]
        with group.exchange(SIGNATURE) as call:
            return call.transport.alltoall(parts)

    for rank, found in enumerate(results(as_threads(size, act))):
        assert found == [words(peer, rank) for peer in range(size)]


@pytest.mark.parametrize("host_keys", HOST_KEYS)
def test_bytes_are_gathered_and_shared(host_keys: list[str]) -> None:
    size = len(host_keys)

    def act(group: Group) -> tuple[list[bytes], bytes]:
        own = bytes([group.rank]) * group.rank * 1_000_000
        root = group.size - 1
        return (
            allgather_bytes(group, own, SIGNATURE),
            broadcast_bytes(group, own, root, SIGNATURE),
        )

    everything = [bytes([rank]) * rank * 1_000_000 for rank in range(size)]
    for gathered, shared in results(as_threads(size, act, host_keys)):
        assert gathered == everything
        assert shared == everything[-1]


def test_different_deeds_are_an_error_on_every_rank() -> None:
    def act(group: Group) -> None:
        meet(group, Signature("gradients of adam" if group.rank != 1 else "barrier"))

    for outcome in as_threads(3, act):
        assert isinstance(outcome, CollectiveMismatchError)
        assert "rank 0, 2: gradients of adam; rank 1: barrier" in str(outcome)


def test_after_a_mismatch_on_all_ranks_the_next_exchange_works() -> None:
    def act(group: Group) -> str:
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError) as raised:
                meet(group, Signature(f"of rank {group.rank}"))
        assert group.failure is None
        meet(group, Signature("of all ranks"))
        return str(raised.value)

    assert len(set(results(as_threads(2, act)))) == 1


def test_an_exchange_does_not_begin_within_another() -> None:
    def act(group: Group) -> None:
        with group.exchange(Signature("outer")):
            meet(group, Signature("inner"))

    (outcome,) = as_threads(1, act)
    assert isinstance(outcome, CollectiveError)
    assert "inner was called within" in str(outcome)


def test_who_waits_says_for_whom() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    noticed = threading.Event()

    def watch(group: Group) -> None:
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            if waiting := group.waiting():
                seen.append((waiting.what, waiting.ranks))
        noticed.set()

    def act(group: Group) -> None:
        meet(group, SIGNATURE)
        if group.rank == 1:
            assert group.waiting() is None
            noticed.wait(10)
        else:
            waits = partial(_fails_to_meet, group)
            results(in_threads([partial(watch, group), waits]))

    assert as_threads(2, act) == [None, None]
    assert seen == [("exchange 2: late", (1,))]


def _fails_to_meet(group: Group) -> None:
    with pytest.raises(PeerLostError):
        meet(group, Signature("late"))


def test_a_rank_that_is_late_is_a_timeout() -> None:
    with held_addresses(2) as addresses:

        def run(rank: int) -> object:
            transport = HostTransport(Member(rank, 2, TOKEN), addresses, timeout_s=0.3)
            group = Group(transport)
            meet(group, SIGNATURE)
            if rank == 1:
                return transport  # Alive, but silent.
            meet(group, Signature("lonely"))
            return None

        waiting, silent = in_threads([partial(run, 0), partial(run, 1)])
    assert isinstance(waiting, CollectiveTimeoutError)
    assert "rank 1" in str(waiting)
    assert "lonely" in str(waiting)
    assert isinstance(silent, HostTransport)
    silent.close()


def test_a_rank_that_never_comes_is_named() -> None:
    with held_addresses(2) as addresses:
        transport = HostTransport(Member(0, 2, TOKEN), addresses, timeout_s=0.2)
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 \(127\.0\.0\.1:"):
            transport.allgather(b"")


_DYING_RANK = """
import sys
from tfcluster.runtime.net.rendezvous import Member
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
transport = HostTransport(Member(1, 3, bytes(range(32))), sys.argv[1:])
transport.allgather(b"")
print("met", flush=True)
sys.stdin.read()
"""


def test_a_killed_rank_is_noticed_within_a_second() -> None:
    with held_addresses(3) as addresses:
        dying = subprocess.Popen(
            [sys.executable, "-c", _DYING_RANK, *addresses],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

        def run(rank: int) -> float:
            transport = HostTransport(Member(rank, 3, TOKEN), addresses)
            transport.allgather(b"")
            if rank == 0:
                assert dying.stdout is not None
                assert dying.stdout.readline() == b"met\n"
                dying.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(PeerLostError):
                transport.allreduce(np.ones(1_000_000), ReduceOp.SUM)
            transport.close()
            return time.monotonic() - killed

        with dying:
            outcomes = results(in_threads([partial(run, 0), partial(run, 2)]))
    assert max(outcomes) < allow_s(1)


def test_a_cluster_on_one_machine_is_not_seen_from_others() -> None:
    with held_addresses(2) as addresses, listen(addresses, 0, "rank 0") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        mixed = [addresses[0], "node1:4000"]
    with (
        held_addresses(1) as addresses,
        listen([*addresses, *mixed], 0, "rank 0") as listener,
    ):
        assert listener.getsockname()[0] == "0.0.0.0"


def test_unauthenticated_connections_are_ignored() -> None:
    with held_addresses(2) as addresses:
        host, port = addresses[0].split(":")

        def intruder() -> None:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    connection = socket.create_connection((host, int(port)), 5)
                except ConnectionRefusedError:
                    continue  # Not listening yet.
                break
            with connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200)

        def rank(number: int) -> None:
            transport = HostTransport(Member(number, 2, TOKEN), addresses)
            if number == 1:
                results(in_threads([intruder] * 5))
            transport.allgather(b"")
            transport.close()

        assert in_threads([partial(rank, 0), partial(rank, 1)]) == [None, None]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_with_another_token_is_refused(wrong: int) -> None:
    with held_addresses(2) as addresses:

        def run(rank: int) -> None:
            token = b"another" if rank == wrong else TOKEN
            HostTransport(Member(rank, 2, token), addresses, timeout_s=2.0).allgather(
                b""
            )

        outcomes = in_threads([partial(run, 0), partial(run, 1)])
    assert all(isinstance(outcome, CollectiveTimeoutError) for outcome in outcomes)
    assert "does not know this run's token" in str(outcomes[1])


def test_a_refusal_is_named_when_the_peer_is_gone_by_the_end() -> None:
    """The peer refuses once, resets the next connection, and then no longer listens."""
    with held_addresses(2) as addresses, listen(addresses, 0, "rank 0") as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.settimeout(5)
            with connection, suppress(HandshakeError):
                accept(connection, Member(0, 2, b"another"))
            connection, _ = listener.accept()
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.close()
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

        def dial() -> None:
            HostTransport(Member(1, 2, TOKEN), addresses, timeout_s=1.0).allgather(b"")

        _, outcome = in_threads([refuse, dial])
    assert "does not know this run's token" in str(outcome)


def _handshake(
    dialer: Callable[[socket.socket], object],
    acceptor: Callable[[socket.socket], object],
) -> list[object]:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(5)
        right.settimeout(5)

        def run(act: Callable[[socket.socket], object], end: socket.socket) -> object:
            try:
                return act(end)
            finally:
                end.close()

        return list(
            in_threads([partial(run, dialer, left), partial(run, acceptor, right)])
        )


def test_both_ends_know_each_other_after_the_handshake() -> None:
    outcomes = _handshake(
        lambda end: dial(end, Member(1, 2, TOKEN), 0),
        lambda end: accept(end, Member(0, 2, TOKEN)),
    )
    assert outcomes == [None, 1]


@pytest.mark.parametrize(
    "dialer",
    [
        Member(1, 2, b"another token"),
        Member(1, 3, TOKEN),
        Member(1, 2, TOKEN, generation=1),
        Member(7, 2, TOKEN),
    ],
)
def test_an_acceptor_welcomes_only_members_of_its_group(dialer: Member) -> None:
    def without_checking(end: socket.socket) -> None:
        """Connect without verifying the other end."""
        end.sendall(b"TFC1" + bytes([0, 0, 0, dialer.rank, 0, 0, 0, 0]) + bytes(32))
        answer = end.recv(64, socket.MSG_WAITALL)
        nonces = bytes(32) + answer[:32]
        end.sendall(dialer.proof(b"dial", (dialer.rank, 0), nonces))

    _, outcome = _handshake(
        without_checking, lambda end: accept(end, Member(0, 2, TOKEN))
    )
    assert isinstance(outcome, HandshakeError | OSError)


def test_an_acceptors_proof_cannot_be_sent_back_to_it() -> None:
    def echo(end: socket.socket) -> None:
        end.sendall(b"TFC1" + bytes([0, 0, 0, 1, 0, 0, 0, 0]) + bytes(32))
        answer = end.recv(64, socket.MSG_WAITALL)
        end.sendall(answer[32:])

    _, outcome = _handshake(echo, lambda end: accept(end, Member(0, 2, TOKEN)))
    assert isinstance(outcome, HandshakeError)

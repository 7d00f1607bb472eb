"""The service of ps tasks over real sockets, with an optimizer in numpy."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.ranks import (
    DEADLINE_S,
    TOKEN,
    held_addresses,
    in_threads,
    installed_signals,
    results,
)
from tests.kit.time_limits import allow_s
from tfcluster.protocol.task_events import Serving
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from tfcluster.runtime.parameter_server import client
from tfcluster.runtime.parameter_server.client import (
    ModelVariable,
    OpenResult,
    ParameterServerClient,
    Rows,
    Slices,
    VariablePiece,
)
from tfcluster.runtime.parameter_server.connections import Connections
from tfcluster.runtime.parameter_server.server_socket import ServerSocket
from tfcluster.runtime.parameter_server.service import MakeEngine, Service

Array = NDArray[Any]

RATE = 0.5
TABLE = ModelVariable("table", "float32", (1000, 4), rows_only=True)
KERNEL = ModelVariable("kernel", "float32", (300, 200))
MODEL = (TABLE, KERNEL)


class Plain:
    """SGD without TensorFlow. The learning rate is its only slot."""

    def __init__(self, values: Sequence[Array]) -> None:
        self._values = [np.array(value) for value in values]
        self._kinds: set[str] = set()
        self._slots = {"sgd/rate": np.array(RATE, "f4")}
        self.kept: Any = None

    @property
    def held_bytes(self) -> int:
        return sum(value.nbytes for value in self._values)

    def knows(self, kinds: str) -> bool:
        return kinds in self._kinds

    def define(self, data: bytes) -> None:
        self._kinds.add(json.loads(data)["kinds"])

    def apply(self, gradients: Sequence[Any], kinds: str) -> None:
        assert kinds in self._kinds
        rate = self._slots["sgd/rate"]
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, Slices):
                value = self._values[index].copy()
                np.subtract.at(value, gradient.indices, rate * gradient.values)
                self._values[index] = value
            elif gradient is not None:
                self._values[index] = self._values[index] - rate * gradient

    def read(self, index: int) -> Array:
        return self._values[index]

    def rows(self, index: int, indices: Array) -> Array:
        return self._values[index][indices]

    def assign(self, index: int, value: Array) -> None:
        self._values[index] = value.copy()

    def slots(self) -> dict[str, Array]:
        return dict(self._slots)

    def assign_slot(self, path: str, value: Array) -> None:
        self._slots[path][...] = value

    def release(self) -> None:
        self._values = [value.copy() for value in self._values]


def packed(pieces: Sequence[VariablePiece], kinds: str) -> bytes:
    return json.dumps({"kinds": kinds}).encode()


class Cluster:
    """Some ps tasks in this process, and clients that connect to them."""

    def __init__(self, addresses: Sequence[str], size: int) -> None:
        self.addresses = addresses
        self.size = size
        self.made: list[ParameterServerClient] = []
        make = cast("MakeEngine", Plain)
        self.services = [Service(size, make) for _ in addresses]
        self.listening = [
            ServerSocket(service, addresses, index, size=size, token=TOKEN)
            for index, service in enumerate(self.services)
        ]

    def connect(self, rank: int, **changed: Any) -> ParameterServerClient:
        options = {"size": self.size, "token": TOKEN, "timeout_s": DEADLINE_S}
        made = ParameterServerClient(
            self.addresses, rank=rank, **{**options, **changed}
        )
        self.made.append(made)
        return made

    def statistics(self) -> list[Serving]:
        """What each ps counts."""
        return [service.statistics() for service in self.services]

    def all(self, act: Callable[[int, ParameterServerClient], Any]) -> list[Any]:
        """Call ``act`` in all tasks at once; what each call returned or raised."""

        def run(rank: int) -> Any:
            servers = self.connect(rank)
            try:
                return act(rank, servers)
            finally:
                servers.close()

        return in_threads([partial(run, rank) for rank in range(self.size)])


@contextmanager
def cluster(count: int = 1, size: int = 2) -> Iterator[Cluster]:
    with held_addresses(count) as addresses:
        made = Cluster(addresses, size)
        try:
            yield made
        finally:
            for servers in made.made:
                servers.close()
            for listening in made.listening:
                listening.close()


def opened(
    servers: ParameterServerClient, start: float = 0.0, **options: Any
) -> OpenResult:
    values = [np.full(v.shape, start, np.float32) for v in MODEL]
    return servers.open("m", MODEL, values, "dd", packed, **options)


def ones(factor: float = 1.0) -> list[Array]:
    return [np.full(v.shape, factor, np.float32) for v in MODEL]


def test_a_handler_of_a_signal_may_exchange_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []
    sent: list[bool] = []
    original = Connections.exchange

    def interrupted(connections: Connections, requests: Any) -> Any:
        if not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGUSR1)
        return original(connections, requests)

    with cluster() as running, installed_signals() as ours:
        monkeypatch.setattr(client, "SIGNALS", ours)
        servers = running.connect(0)
        signal.signal(signal.SIGUSR1, lambda *_: found.append(servers.get("a note")))
        monkeypatch.setattr(Connections, "exchange", interrupted)
        servers.put("a note", "text")
        assert found == ["text"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_asynchronous_gradients_are_all_applied(count: int) -> None:
    def act(rank: int, servers: ParameterServerClient) -> Any:
        opened(servers, 1.0, splittable=True)
        for _ in range(10):
            servers.push("m", ones(rank + 1.0))
        return None

    with cluster(count) as running:
        results(running.all(act))
        late = running.connect(0)
        first = opened(late, 99.0, splittable=True)
        # w = w0 - rate * (10 * g1 + 10 * g2): no gradient is averaged or lost.
        for value in (*first.values, *late.pull("m")):
            np.testing.assert_array_equal(value, 1.0 - RATE * 30)
        counts = running.statistics()
        assert [each.applied for each in counts if each.bytes] == [20] * min(
            count, len(counts)
        )
        late.close()


@pytest.mark.parametrize("size", [2, 3])
def test_in_step_the_parts_of_all_ranks_are_applied_once(size: int) -> None:
    rng = np.random.default_rng(0)
    steps = [[rng.normal(size=v.shape).astype("f4") for v in MODEL] for _ in range(5)]

    def act(rank: int, servers: ParameterServerClient) -> list[Any]:
        # The chief's values count, and so does only its first gradient.
        opened(servers, 1.0 + rank, synchronous=True, splittable=True)
        first = [gradient + rank for gradient in steps[0]]
        return [servers.push("m", step) for step in (first, *steps[1:])]

    with cluster(2, size) as running:
        found = results(running.all(act))
        assert [s.applied for s in running.statistics()] == [5, 5]
    expected = [np.full(v.shape, 1.0, "f4") for v in MODEL]
    for step, gradients in enumerate(steps):
        expected = [e - RATE * g for e, g in zip(expected, gradients, strict=True)]
        for ours in found:
            for value, right in zip(ours[step], expected, strict=True):
                np.testing.assert_allclose(value, right, rtol=1e-6)


def test_in_step_all_wait_for_the_chief_to_define_the_model() -> None:
    with cluster() as running:
        chief, other = running.connect(0), running.connect(1)
        calls: list[Callable[[], Any]] = [
            partial(opened, other, 2.0, synchronous=True),
            chief.close,
        ]
        error = in_threads(calls)[0]
        assert isinstance(error, PeerLostError)
        assert "rank 0 has left" in str(error)


def test_gradients_on_old_weights_are_dropped_and_counted() -> None:
    with cluster(size=1) as running:
        servers, old = running.connect(0), running.connect(0)
        opened(servers, synchronous=True)
        opened(old, synchronous=True)
        servers.push("m", ones())
        table, kernel = old.push("m", ones(100.0))
        # The client receives the current weights instead.
        np.testing.assert_array_equal(kernel, -RATE)
        assert isinstance(table, np.ndarray)
        old.push("m", ones())
        (counts,) = running.statistics()
        assert (counts.applied, counts.dropped) == (2, 1)
        np.testing.assert_array_equal(servers.pull("m")[1], -2 * RATE)


def test_staleness_is_counted() -> None:
    with cluster() as running:
        first, second = running.connect(0), running.connect(1)
        opened(first)
        opened(second)
        for _ in range(3):
            first.push("m", ones())
        second.push("m", ones())
        (counts,) = running.statistics()
        assert counts.staleness_max == 3
        assert counts.staleness_mean == pytest.approx(3 / 4)


def test_a_late_worker_begins_with_the_weights_of_the_ps() -> None:
    with cluster(2) as running:
        first, late = running.connect(0), running.connect(1)
        assert opened(first, 5.0).defined
        first.push("m", ones())
        again = opened(late, 7.0)
        assert not again.defined
        assert again.version == 1
        for value in again.values:
            np.testing.assert_array_equal(value, 5.0 - RATE)


def test_only_rows_that_have_changed_come_back() -> None:
    with cluster(2) as running:
        first, second = running.connect(0), running.connect(1)
        opened(first, splittable=True)
        opened(second, splittable=True)
        rows = Slices(np.ones((2, 4), "f4"), np.array([3, 999]))
        table, kernel = first.push("m", [rows, None])
        assert isinstance(table, Rows)
        assert sorted(table.indices) == [3, 999]
        np.testing.assert_array_equal(table.values, -RATE)
        again, _ = first.push("m", [Slices(rows.values[:1], np.array([5])), None])
        assert isinstance(again, Rows)
        assert list(again.indices) == [5]
        # The second client has not received any of these rows yet.
        theirs, _ = second.push("m", [Slices(rows.values[:0], np.array([], int)), None])
        assert isinstance(theirs, Rows)
        assert sorted(theirs.indices) == [3, 5, 999]
        assert first.sent_bytes < 1_200_000
        np.testing.assert_array_equal(kernel, 0.0)


def test_what_is_assigned_reaches_all() -> None:
    with cluster(2) as running:
        first, second = running.connect(0), running.connect(1)
        opened(first, splittable=True)
        opened(second, splittable=True)
        second.push("m", ones())
        first.assign("m", "table", np.full(TABLE.shape, 7, "f4"))
        first.assign("m", "sgd/rate", np.float32(0.25))
        with pytest.raises(KeyError, match="sgd/speed"):
            first.assign("m", "sgd/speed", np.float32(0.25))
        assert second.slots("m") == {"sgd/rate": np.float32(0.25)}
        table, kernel = second.push("m", ones())
        np.testing.assert_array_equal(table, 7 - 0.25)
        np.testing.assert_array_equal(kernel, -RATE - 0.25)


def test_notes() -> None:
    with cluster() as running:
        first, second = running.connect(0), running.connect(1)
        assert second.get("stop") is None
        first.put("epoch/0", "3")
        second.put("epoch/1", "ä")
        assert second.get("epoch/0") == "3"
        assert first.get("epoch/1") == "ä"


def test_another_model_is_refused_with_its_differences() -> None:
    with cluster(2) as running:
        first, second = running.connect(0), running.connect(1)
        opened(first)
        other = (ModelVariable("tabel", "float32", (1000, 4)), KERNEL)
        values = [np.zeros(v.shape, np.float32) for v in other]
        with pytest.raises(CollectiveMismatchError, match="table is missing; tabel is"):
            second.open("m", other, values, "dd", packed)


def test_the_next_one_defines_a_model_that_the_first_has_left_undefined() -> None:
    def dies(pieces: Sequence[VariablePiece], kinds: str) -> bytes:
        begun.set()
        assert waiting.wait(DEADLINE_S)
        raise SystemExit

    begun, waiting = threading.Event(), threading.Event()
    with cluster(2) as running:
        first, second = running.connect(0), running.connect(1)

        def fail() -> None:
            values = [np.zeros(v.shape, np.float32) for v in MODEL]
            try:
                first.open("m", MODEL, values, "dd", dies)
            finally:
                first.close()

        def take_over() -> OpenResult:
            assert begun.wait(DEADLINE_S)
            waiting.set()
            return opened(second, 4.0)

        _, found = in_threads([fail, take_over])
        assert isinstance(found, OpenResult)
        assert found.defined


def test_a_worker_that_dies_within_a_message_disturbs_nobody() -> None:
    with cluster() as running:
        first, dying = running.connect(0), running.connect(1)
        opened(first)
        opened(dying)
        (line,) = dying._connections._sockets
        line.setblocking(True)
        line.sendall(b"\0\0\0\x40" + (1 << 30).to_bytes(8, "big") + b'{"op":')
        dying.close()
        np.testing.assert_array_equal(first.push("m", ones())[1], -RATE)
        (counts,) = running.statistics()
        assert counts.applied == 1


def test_in_step_who_leaves_is_named_to_all_that_wait() -> None:
    with cluster(size=3) as running:
        tasks = [running.connect(rank) for rank in range(3)]
        for task in tasks:
            opened(task, synchronous=True)
        pushes: list[Callable[[], Any]] = [
            partial(task.push, "m", ones()) for task in tasks[:2]
        ]
        found = in_threads([*pushes, tasks[2].close])[:2]
        for error in found:
            assert isinstance(error, PeerLostError)
            assert "rank 2 has left" in str(error)


def test_in_step_unlike_gradients_are_an_error_on_all() -> None:
    def act(rank: int, servers: ParameterServerClient) -> Any:
        opened(servers, synchronous=True)
        return servers.push("m", [ones()[0], None] if rank else ones())

    with cluster() as running:
        for error in running.all(act):
            assert isinstance(error, CollectiveMismatchError)
            assert "rank 1 has no gradient" in str(error)


def test_a_ps_that_is_gone_is_named_at_once() -> None:
    with cluster(2) as running:
        first = running.connect(0)
        opened(first, synchronous=True, splittable=True)
        ends: list[float] = []

        def end() -> None:
            running.listening[1].close()
            ends.append(time.monotonic())

        acts: list[Callable[[], Any]] = [partial(first.push, "m", ones()), end]
        error, _ = in_threads(acts)
        assert isinstance(error, PeerLostError)
        assert f"ps:1 ({running.addresses[1]}) is gone" in str(error)
        assert time.monotonic() - ends[0] < allow_s(1)
        with pytest.raises(PeerLostError, match="ps:1"):
            first.pull("m")


def test_unauthenticated_clients_are_rejected() -> None:
    with cluster() as running:
        host, _, port = running.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port))) as mute:
            with pytest.raises(CollectiveTimeoutError, match="run's token"):
                running.connect(1, token=bytes(32), timeout_s=0.2)
            first = running.connect(0)
            opened(first)
            mute.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(60))
            mute.settimeout(DEADLINE_S)
            with suppress(ConnectionResetError):
                assert mute.recv(1) == b""
        np.testing.assert_array_equal(first.push("m", ones())[1], -RATE)


def test_a_ps_that_never_comes_is_named() -> None:
    with (
        held_addresses(1) as addresses,
        pytest.raises(CollectiveTimeoutError, match=f"ps:0 at {addresses[0]}"),
    ):
        ParameterServerClient(addresses, rank=1, size=2, token=TOKEN, timeout_s=0.1)


def test_an_update_that_fails_says_so_to_all_in_step() -> None:
    def act(rank: int, servers: ParameterServerClient) -> Any:
        opened(servers, synchronous=True)
        return servers.push("m", [np.ones((2, 2), "f4"), None])

    with cluster() as running:
        for error in running.all(act):
            assert isinstance(error, CollectiveError)
            assert "reshape" in str(error)

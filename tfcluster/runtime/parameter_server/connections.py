"""A training task's connections to all ps tasks: concurrent requests and answers.

The module does not know what the messages mean.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping, Sequence

from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)
from tfcluster.runtime.net.buffer_pool import Pool
from tfcluster.runtime.net.rendezvous import dial_until
from tfcluster.runtime.parameter_server.messages import (
    ClientChannel,
    Incoming,
    MessageError,
    Outgoing,
    PsMessage,
)
from tfcluster.runtime.parameter_server.server_socket import member, tune


class Connections:
    """Connections to all ps tasks, by their index. Not thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        rank: int,
        size: int,
        token: bytes,
        join_timeout_s: float,
        stall_timeout_s: float | None,
    ) -> None:
        """Connect; raises CollectiveTimeoutError after ``join_timeout_s`` seconds.

        ``stall_timeout_s`` limits the wait for any byte of an answer; None: no limit.
        """
        self._addresses = tuple(addresses)
        self._timeout_s = stall_timeout_s
        self._pool = Pool()
        self._sockets: list[socket.socket] = []
        self.channels = [ClientChannel() for _ in addresses]
        self._failure: CollectiveError | None = None
        self.waited_s = 0.0
        self.sent_bytes = 0
        self.exchanged_bytes = 0
        """The bytes of arrays sent and received, including those in shared memory."""
        deadline = time.monotonic() + join_timeout_s
        try:
            for index, address in enumerate(addresses):
                identity = member(index, rank, size, token)
                names = (f"rank {rank}", f"ps:{index}")
                connection = dial_until(deadline, identity, 0, address, names)
                self._sockets.append(connection)
                tune(connection)
                connection.setblocking(False)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """The number of ps tasks."""
        return len(self._addresses)

    def close(self) -> None:
        """Close all sockets."""
        for connection in self._sockets:
            connection.close()

    def share_memory(self, model: str, sizes: Mapping[int, int]) -> None:
        """Share memory with each ps on this host, for messages of ``sizes`` bytes.

        Raises what ``exchange`` raises.
        """
        for ps, size in sizes.items():
            offered = self.channels[ps].offer(size)
            if offered is not None:
                message, descriptor = offered
                answer = self.exchange({ps: message})[ps]
                self.channels[ps].accept_answer(model, answer, descriptor)

    def exchange(self, requests: Mapping[int, PsMessage]) -> dict[int, PsMessage]:
        """Send each ps its message, and return their answers, by the index of the ps.

        Raises PeerLostError if a ps is gone, CollectiveTimeoutError if one does not
        answer in time, and CollectiveError if it violates the protocol. All later calls
        raise the same error, because an answer may have been lost.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._exchange(requests)
        except CollectiveError as error:
            self._failure = error
            raise

    def _exchange(self, requests: Mapping[int, PsMessage]) -> dict[int, PsMessage]:
        sending = {ps: Outgoing(message) for ps, message in requests.items()}
        buffers = [channel.buffers for channel in self.channels]
        receiving = {ps: Incoming(self._pool, buffers[ps]) for ps in requests}
        answers: dict[int, PsMessage] = {}
        while receiving:
            progress = False
            for ps in list(receiving):
                progress |= self._transfer(ps, sending, receiving[ps])
                if receiving[ps].done:
                    answers[ps] = receiving.pop(ps).message()
                    moved = requests[ps].size + answers[ps].size
                    self.exchanged_bytes += moved
            if receiving and not progress:
                self._wait(sending, receiving)
        return answers

    def _transfer(
        self, ps: int, sending: dict[int, Outgoing], incoming: Incoming
    ) -> bool:
        connection = self._sockets[ps]
        progress = False
        try:
            if ps in sending:
                self.sent_bytes += sending[ps].send(connection)
                progress = True
                if sending[ps].done:
                    del sending[ps]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lost_error(ps, error) from error
        try:
            # An answer, usually an error, may come before everything has been sent.
            incoming.receive(connection)
            progress = True
        except BlockingIOError:
            pass
        except (OSError, EOFError) as error:
            raise self._lost_error(ps, error) from error
        except MessageError as error:
            raise CollectiveError(
                f"ps:{ps} ({self._addresses[ps]}) sent {error}"
            ) from error
        return progress

    def _wait(
        self, sending: Mapping[int, Outgoing], receiving: Mapping[int, Incoming]
    ) -> None:
        poll = select.poll()
        for ps in receiving:
            wanted = select.POLLIN | (select.POLLOUT if ps in sending else 0)
            poll.register(self._sockets[ps], wanted)
        start = time.monotonic()
        timeout = None if self._timeout_s is None else self._timeout_s * 1000
        ready = poll.poll(timeout)
        self.waited_s += time.monotonic() - start
        if not ready:
            silent = ", ".join(f"ps:{ps} ({self._addresses[ps]})" for ps in receiving)
            raise CollectiveTimeoutError(
                f"{silent} has not answered for {self._timeout_s:g} s"
            )

    def _lost_error(self, ps: int, error: Exception) -> PeerLostError:
        cause = getattr(error, "strerror", None) or "connection closed"
        return PeerLostError(
            f"ps:{ps} ({self._addresses[ps]}) is gone: its process ended or the "
            f"connection to it broke ({cause})"
        )

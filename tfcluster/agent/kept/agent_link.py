"""The socket between an agent that was started and the one that took its place.

An agent that takes a kept interpreter hands its run over to a new agent, which descends
from that interpreter. The old agent only waits for the new one to end: if either side
ends, the other one reads an end of file. ``docs/protocols.md`` ("Kept interpreters")
lists the frames.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from tfcluster.agent import exit_codes, proc
from tfcluster.agent.kept.client import receive
from tfcluster.agent.light_dataclasses import dataclass
from tfcluster.agent.loop import Loop
from tfcluster.agent.proc import Process
from tfcluster.agent.signals import send
from tfcluster.wire import Decoder, Frame, WireError, encode

AGREE_S = 10.0
"""How long the new agent may take to start."""


@dataclass(frozen=True, slots=True)
class Server:
    """A fork of a kept interpreter that can fork tasks, a child of this agent."""

    pid: int
    end: socket.socket


class NewEnd:
    """The new agent's end, and what the kept interpreter has given it."""

    def __init__(self, end: socket.socket, servers: Sequence[Server]) -> None:
        self._end = end
        self._decoder = Decoder()
        self._early: list[Frame] = []
        self.servers = servers
        self.about: Frame = {}
        """The kept interpreter's description of itself."""

    def agree(self) -> bytes | None:
        """Report that we are here. Returns what the launcher has sent so far, or None.

        None: the old agent continues by itself, and this one must leave no trace.
        """
        me = proc.read(os.getpid())
        here = {"type": "here", "pid": os.getpid(), "start": me.start_time if me else 0}
        self._end.settimeout(AGREE_S)
        try:
            self._end.sendall(encode(here))
            go, *self._early = receive(self._end, self._decoder)
        except (OSError, WireError):
            return None
        self.about = go["about"]
        return base64.b64decode(go["data"])

    def watch(
        self, loop: Loop, guard_died: Callable[[int], None], lost: Callable[[], None]
    ) -> None:
        """Call ``guard_died`` with the pid of the old agent's guard when the guard
        dies, and ``lost`` when the old agent dies."""
        self._end.setblocking(False)

        def read() -> None:
            if (data := _received(self._end)) is None:
                return
            if not data:
                loop.unwatch(self._end.fileno())
                lost()
            take(list(self._decoder.feed(data)))

        def take(frames: Sequence[Frame]) -> None:
            for frame in frames:
                if frame["type"] == "guard_died":
                    guard_died(int(frame["pid"]))

        loop.post(lambda: take(self._early))
        loop.watch(self._end.fileno(), read)


def _received(end: socket.socket) -> bytes | None:
    """What has arrived; empty: the other end is gone; None: nothing has arrived yet."""
    try:
        return end.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def say_code(end: int, code: int) -> None:
    """Tell the old agent the exit code with which the guard or agent ends."""
    with suppress(OSError):
        os.write(end, encode({"type": "ended", "code": code}))


class OldEnd:
    """The old agent's end, once it has handed over: it only waits and passes on."""

    def __init__(self, end: socket.socket, agent: Process) -> None:
        self._end = end
        self._agent = agent
        self._decoder = Decoder()
        self._code: int | None = None

    def watch(self, loop: Loop, ended: Callable[[int, bool], None]) -> None:
        """Call ``ended`` with the new agent's exit code, and with whether the new agent
        has left nothing behind, as far as we know."""
        self._end.setblocking(False)

        def read() -> None:
            if (data := _received(self._end)) is None:
                return
            for frame in self._decoder.feed(data):
                if frame["type"] == "ended":
                    self._code = int(frame["code"])
            if not data:
                loop.unwatch(self._end.fileno())
                if self._code is None:
                    ended(exit_codes.AGENT_DIED, False)
                else:
                    ended(self._code, True)

        loop.watch(self._end.fileno(), read)

    def go(self, about: Frame, data: bytes) -> None:
        """Put the new agent in charge. Raises OSError."""
        text = base64.b64encode(data).decode()
        self._end.settimeout(AGREE_S)
        self._end.sendall(encode({"type": "go", "about": about, "data": text}))

    def forward(self, signum: int) -> None:
        send(self._agent, signum)

    def guard_died(self, pid: int) -> None:
        with suppress(OSError):
            self._end.send(encode({"type": "guard_died", "pid": pid}))

"""The connection to one agent: sends frames in order, posts received frames.

Knows the outer form of the channel (noise, hello, frames), not what frames mean.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from tfcluster import __version__
from tfcluster.backends.base import Channel, Starter
from tfcluster.errors import TfclusterError
from tfcluster.model import Host
from tfcluster.wire import PROTOCOL, Frame, LineBuffer, WireError, encode, parse

MAX_NOISE_BYTES = 1 << 16
HEARTBEAT_S = 5.0
LEASE_S = 30.0
"""An agent that hears nothing for this long ends its tasks."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame from the agent of ``host``."""

    host: str
    frame: Frame
    heard_s: float = field(default_factory=time.time)
    """When it arrived; Unix time."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The channel to ``host`` has ended; ``cause`` says why, as far as known."""

    host: str
    cause: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The agent of ``host`` was started but has not sent anything yet."""

    host: str
    contact: AgentConnection
    resolved: tuple[str, ...] = ()
    """The addresses that the host's name resolves to on this machine."""
    begun_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """When it began to connect, to resolve the name, and to wait for the agent."""


@dataclass(frozen=True, slots=True)
class Unopened:
    """The agent of ``host`` could not be started."""

    host: str
    error: TfclusterError


@dataclass(frozen=True, slots=True)
class Answered:
    """Whether a host that had fallen silent answers on another connection."""

    host: str
    answers: bool


@dataclass(frozen=True, slots=True)
class CameBack:
    """Whether a host that was lost answers again."""

    host: str
    answers: bool


Post = Callable[[Received | Closed], None]


class AgentConnection:
    """One agent's channel with a reading and a writing thread.

    ``post`` is called from the reading thread.
    """

    def __init__(self, host: str, channel: Channel, nonce: str, post: Post) -> None:
        self.host = host
        self.began_s = time.time()
        """Unix time; the agent sent everything after that."""
        self._channel = channel
        self._nonce = nonce
        self._post = post
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{name} {host}", daemon=True)
            for name, target in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame) -> None:
        """Queue a frame; never blocks. Raises WireError if the frame is too long."""
        self._outbox.put(encode(frame))

    def close(self) -> None:
        """Close the agent's input once everything queued has been sent."""
        self._outbox.put(None)

    def kill(self) -> None:
        """End the contact now."""
        self._channel.kill()
        self.close()

    def _write(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._channel.write(data)
        except OSError:
            pass  # the reading thread sees the end, too, and reports it
        finally:
            self._channel.close()

    def _read(self) -> None:
        try:
            self._read_frames()
            cause = "its agent ended"
        except (OSError, WireError) as error:
            cause = str(error)
            self._channel.kill()
        said = self._channel.diagnosis()
        self._post(Closed(self.host, f"{cause} ({said})" if said else cause))

    def _read_frames(self) -> None:
        lines = LineBuffer()
        noise = bytearray()
        greeted = False
        while data := self._channel.read():
            for line in lines.feed(data):
                if not greeted:
                    frame = self._hello(line)
                    if frame is None:
                        noise += line + b"\n"
                        if len(noise) > MAX_NOISE_BYTES:
                            raise WireError("no hello from the agent, only other text")
                        continue
                    greeted = True
                else:
                    frame = parse(line)
                self._post(Received(self.host, frame))
        if not greeted and noise.strip():
            said = noise.decode(errors="backslashreplace").strip().splitlines()[-1]
            raise WireError(f"no hello from the agent; it said: {said[:200]}")

    def _hello(self, line: bytes) -> Frame | None:
        """The hello frame with our nonce; None for any other line, which is noise."""
        try:
            frame = parse(line)
        except WireError:
            return None
        known = frame["type"] == "hello" and frame.get("nonce") == self._nonce
        return frame if known else None


def open_agent(
    starter: Starter,
    host: Host,
    run: str,
    grace_s: float,
    post: Callable[[Received | Closed], None],
    *,
    witness: str | None = None,
    warm: Sequence[Frame] = (),
) -> AgentConnection:
    """Start an agent and send it ``open``. Raises HostError or StartError.

    ``witness`` is the path of a file of this run. The agent tells whether it sees it,
    that is, whether the host shares our files. ``warm``: the warm interpreters that we
    expect to need; the agent may take kept ones.
    """
    nonce = secrets.token_hex(16)
    contact = AgentConnection(host.name, starter.start_agent(host), nonce, post)
    contact.send(
        {
            "type": "open",
            "protocol": PROTOCOL,
            "version": __version__,
            "nonce": nonce,
            "run": run,
            "lease_s": LEASE_S,
            "heartbeat_s": HEARTBEAT_S,
            "grace_s": grace_s,
            "witness": witness,
            "warm": list(warm),
        }
    )
    return contact

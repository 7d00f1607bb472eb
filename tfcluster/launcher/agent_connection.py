"""The connection to one agent: sends requests in order, posts received messages."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from tfcluster import __version__
from tfcluster.base.errors import TfclusterError
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.launcher.host_facts import resolved_address
from tfcluster.plan.model import Host
from tfcluster.protocol import messages
from tfcluster.protocol.frames import ProtocolError, encode, type_of
from tfcluster.protocol.messages import Hello, Message
from tfcluster.protocol.requests import Open, Request
from tfcluster.protocol.wire import PROTOCOL, LineBuffer, WireError, parse
from tfcluster.schedulers.starting import AgentChannel, Starter, StartsTogether


@dataclass(frozen=True, slots=True)
class Watch:
    """A descriptor to read from, and what to do; ``name`` is the name of a thread."""

    name: str
    descriptor: int
    ready: Callable[[], bool]
    """Reads what is there, in the reading thread; returns False at the end."""
    end: Callable[[], None]
    """Called after the end, in a thread of its own; may close the descriptor."""


class ChannelReader:
    """Safe to call from all threads. Its thread ends when nothing is watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Watch] = []
        self._wake: int | None = None
        """Wakes the thread; None while there is none."""

    def watch(self, watch: Watch) -> None:
        with self._lock:
            self._new.append(watch)
            if self._wake is not None:
                with contextlib.suppress(BlockingIOError):  # it is awake already
                    os.write(self._wake, b"w")
                return
            woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        act, args = self._read, (woken,)
        threading.Thread(target=act, args=args, name="channels", daemon=True).start()

    def _read(self, woken: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while self._watches_any(selector):
                for key, _ in selector.select():
                    if key.data is None:
                        os.read(woken, 1 << 12)
                    elif not key.data.ready():
                        # Forget it first: afterwards its number may be reused.
                        selector.unregister(key.fd)
                        name, end = key.data.name, key.data.end
                        threading.Thread(target=end, name=name, daemon=True).start()
        os.close(woken)

    def _watches_any(self, selector: selectors.BaseSelector) -> bool:
        with self._lock:
            for watch in self._new:
                selector.register(watch.descriptor, selectors.EVENT_READ, watch)
            self._new.clear()
            if len(selector.get_map()) > 1 or self._wake is None:
                return True
            os.close(self._wake)
            self._wake = None
            return False


MAX_NOISE_BYTES = 1 << 16
HEARTBEAT_S = 5.0
LEASE_S = 30.0
"""An agent that receives nothing for this long ends its tasks."""


@dataclass(frozen=True, slots=True)
class Received:
    host: str
    message: Message
    heard_s: float = field(default_factory=time.time)
    """When the message arrived; Unix time."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The channel to ``host`` has ended; ``cause`` says why, as far as we know."""

    host: str
    cause: str


@dataclass(frozen=True, slots=True)
class Opened:
    host: str
    connection: AgentConnection
    resolved: tuple[str, ...] = ()
    """The addresses that the host's name resolves to on this machine."""
    begun_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """When we began to connect, to resolve the name, and to wait for the agent."""


@dataclass(frozen=True, slots=True)
class Unopened:
    host: str
    error: TfclusterError
    began_s: float
    """When we began to connect."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Whether a host that is silent, or was lost, answers on another connection."""

    host: str
    answers: bool


Post = Callable[[Received | Closed], None]


class AgentConnection:
    """One agent's channel, with a writing thread; other threads call ``post``."""

    def __init__(
        self,
        host: str,
        channel: AgentChannel,
        nonce: str,
        post: Post,
        reader: ChannelReader,
    ) -> None:
        self.host = host
        self._heard_s = time.monotonic()
        """When the newest bytes were read, by the clock of ``time.monotonic``."""
        self.began_s = time.time()
        """Unix time before which the agent cannot have sent anything."""
        self._channel = channel
        self._post = post
        self._reception = Reception(nonce)
        self._cause, self._broken = "its agent ended", False
        self._reader = reader
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._is_closed = False
        self._watch = Watch(f"end {host}", channel.fileno(), self._read, self._end)
        name = f"write {host}"
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def listen(self) -> None:
        """Begin to post messages. Their handler must have this connection by then."""
        self._reader.watch(self._watch)

    def send(self, request: Request) -> None:
        """Queue a request; never blocks. Raises WireError if it is too long."""
        data = encode(request)
        if not self._is_closed:
            self._outbox.put(data)

    def close(self) -> None:
        """Close the agent's input once everything queued has been sent."""
        self._outbox.put(None)

    def kill(self) -> None:
        self._channel.kill()
        self.close()

    def silent_s(self) -> float:
        """How long ago anything arrived, even if nobody has handled it yet."""
        if self._channel.has_unread():
            return 0.0
        return time.monotonic() - self._heard_s

    def _write(self) -> None:
        """Write what is queued, in a thread of its own, because this may block."""
        with contextlib.suppress(OSError):  # the reading thread sees and reports it
            while (data := self._outbox.get()) is not None:
                self._channel.write(data)
        self._is_closed = True
        self._channel.close()

    def _read(self) -> bool:
        try:
            if data := self._channel.read():
                self._heard_s = time.monotonic()
                for message in self._reception.feed(data):
                    self._post(Received(self.host, message))
                return True
            self._reception.end()
        except ProtocolError as error:
            self._cause = f"its agent violated the protocol: {error}"
            self._broken = True
        except (OSError, WireError) as error:
            self._cause, self._broken = str(error), True
        except Exception as error:  # one host must not silence all others
            self._cause, self._broken = f"{type(error).__name__}: {error}", True
        return False

    def _end(self) -> None:
        if self._broken:
            self._channel.kill()
        self.close()
        details = self._channel.diagnosis()
        cause = f"{self._cause} ({details})" if details else self._cause
        self._post(Closed(self.host, cause))


class Reception:
    """Finds the messages of an agent in what arrives on its channel. Pure."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._lines = LineBuffer()
        self._noise = bytearray()
        self._greeted = False

    def feed(self, data: bytes) -> Iterator[Message]:
        for line in self._lines.feed(data):
            if self._greeted:
                yield messages.decode(parse(line))
            elif (hello := self._hello(line)) is not None:
                self._greeted = True
                yield hello
            else:
                self._noise += line + b"\n"
                if len(self._noise) > MAX_NOISE_BYTES:
                    raise WireError("no hello from the agent, only other text")

    def end(self) -> None:
        """The channel has ended. Raises WireError if no agent ever greeted us."""
        if not self._greeted and self._noise.strip():
            lines = self._noise.decode(errors="backslashreplace").strip().splitlines()
            raise WireError(f"no hello from the agent; it said: {lines[-1][:200]}")

    def _hello(self, line: bytes) -> Message | None:
        """The hello with our nonce, or None. Raises WireError: wrong version."""
        try:
            frame = parse(line)
        except WireError:
            return None
        if frame["type"] != type_of(Hello) or frame.get("nonce") != self._nonce:
            return None
        theirs = frame.get("version")
        if theirs != __version__ or frame.get("protocol") != PROTOCOL:
            raise WireError(f"it runs tfcluster {theirs}, but this is {__version__}")
        return messages.decode(frame)


def open_agent(
    starter: Starter,
    host: Host,
    run: str,
    grace_s: float,
    post: Post,
    reader: ChannelReader,
    *,
    witness: str | None = None,
) -> AgentConnection:
    """Start an agent and send it ``open``. Raises HostError or StartError.

    The caller calls ``listen`` once it can handle messages. The agent says whether
    it sees the file ``witness`` of this run, so whether the host shares our files.
    """
    nonce = os.urandom(16).hex()
    channel = starter.start_agent(host)
    connection = AgentConnection(host.name, channel, nonce, post, reader)
    opened = Open(
        protocol=PROTOCOL,
        version=__version__,
        nonce=nonce,
        run=run,
        lease_s=LEASE_S,
        heartbeat_s=HEARTBEAT_S,
        grace_s=grace_s,
        witness=witness,
    )
    connection.send(opened)
    return connection


FAN_OUT = 32
"""How many hosts are connected to in parallel."""


def open_all(
    starter: Starter,
    hosts: Sequence[Host],
    open_one: Callable[[Host], AgentConnection],
    post: Callable[[Opened | Unopened], None],
) -> None:
    """Start agents by ``open_one``, FAN_OUT at a time; does not wait for them."""
    waiting: SimpleQueue[Host] = SimpleQueue()
    for host in hosts:
        waiting.put(host)
    if isinstance(starter, StartsTogether):
        starter.expect(hosts)

    def open_some() -> None:
        with contextlib.suppress(Empty):
            while True:
                _open(waiting.get_nowait(), open_one, post)

    for number in range(min(FAN_OUT, len(hosts))):
        name = f"open {number}"
        threading.Thread(target=open_some, name=name, daemon=True).start()


def _open(
    host: Host,
    open_one: Callable[[Host], AgentConnection],
    post: Callable[[Opened | Unopened], None],
) -> None:
    began_s = time.time()
    try:
        connection = open_one(host)
    except TfclusterError as error:
        post(Unopened(host.name, error, began_s))
        return
    connected_s = time.time()
    resolved = resolved_address(host)
    begun_s = began_s, connected_s, time.time()
    post(Opened(host.name, connection, resolved, begun_s))
    connection.listen()

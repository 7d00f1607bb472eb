"""Keeps strangers out of TensorFlow's servers, which authenticate nobody.

A runtime tells the agent that it has started a server. For a program without a runtime,
the agent checks from time to time whether the program listens on its task's port. In
both cases, a ``RejectingListener`` rejects strangers from then on, and the connections
that they already have are cut.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator

from tfcluster.agent import tcp_sockets
from tfcluster.agent.channel import Channel
from tfcluster.agent.loop import Loop, Timer
from tfcluster.agent.task import AgentTask
from tfcluster.agent.tcp_sockets import listeners
from tfcluster.base import peer_filter
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.base.peer_filter import INSTRUCTION, program
from tfcluster.protocol.messages import Note

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable

    from tfcluster.base.peer_filter import Network

_POLL_S = 0.2  # for how long strangers may reach a server that was just started
_POLL_SLOW_S = 1.0  # once each task's server is guarded
_POLL_SHARE = 0.02  # the largest share of the agent's time that polling may take
_FRESH_S = 3.0  # for how long after a change more listeners may follow
_ACCEPT_RETRY_S = 0.5
_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h; Python has no name for it


@dataclass(frozen=True, slots=True)
class ListenerGroup:
    """What the sockets among which the kernel chooses have in common."""

    family: int
    host: str
    port: int
    only_ipv6: bool

    @classmethod
    def of(cls, listener: socket.socket) -> ListenerGroup:
        host, port = listener.getsockname()[:2]
        only_ipv6 = listener.family == socket.AF_INET6 and bool(
            listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        )
        return cls(listener.family, host, port, only_ipv6)

    @property
    def is_private(self) -> bool:
        """Whether only programs of this host can connect anyway."""
        return self.host == "::1" or self.host.startswith("127.")


class RejectingListener:
    """Joins a group of ``count`` sockets, and lets only ``networks`` through to them.

    Sockets of one user that listen on one port with SO_REUSEPORT form a group, from
    which the kernel chooses one socket for each connection. A program in the kernel
    sends the connections of strangers to our socket, and leaves the others to the
    sockets that were there before. It needs neither privileges nor the cooperation of
    the listening program.

    Raises OSError if it cannot join, for example a group without SO_REUSEPORT.
    """

    def __init__(
        self, loop: Loop, group: ListenerGroup, count: int, networks: Iterable[Network]
    ) -> None:
        self._loop = loop
        self._socket = socket.socket(group.family, socket.SOCK_STREAM)
        try:
            self._join(group)
            self._socket.listen()
            # struct sock_fprog: the number of instructions, and their address.
            code = array("B", program(networks, count))
            argument = struct.pack(
                "@HP", len(code) // INSTRUCTION.size, code.buffer_info()[0]
            )
            self._socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, argument
            )
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._watch()

    def _join(self, group: ListenerGroup) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if group.family == socket.AF_INET6:
            self._socket.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(group.only_ipv6)
            )
        self._socket.bind((group.host, group.port))

    @property
    def inode(self) -> int:
        return os.fstat(self._socket.fileno()).st_ino

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch(self._socket.fileno(), self._reject)

    def _reject(self) -> None:
        try:
            while True:
                self._socket.accept()[0].close()
        except BlockingIOError:
            return
        except OSError:  # such as no free descriptor: a retry must not follow at once
            self._loop.unwatch(self._socket.fileno())
            self._loop.later(_ACCEPT_RETRY_S, self._watch)


@dataclass(eq=False)
class _Watch:
    task: AgentTask
    port: int
    networks: tuple[Network, ...]
    listeners: set[int] = field(default_factory=set)
    """Inodes of the task's sockets that listen there."""
    rejecting_listeners: list[RejectingListener] = field(default_factory=list)
    changed_s: float = 0.0
    """When the listeners last changed, by the loop's clock."""

    def open(self) -> None:
        """Let strangers connect again."""
        for each in self.rejecting_listeners:
            each.close()
        self.rejecting_listeners.clear()


class PortGuard:
    """Polls as long as there is a task that has a server, or may have one."""

    def __init__(
        self, loop: Loop, channel: Channel, tree: Callable[[AgentTask], set[int]]
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._tree = tree
        self._watches: list[_Watch] = []
        self._timer: Timer | None = None

    def expect(self, task: AgentTask) -> None:
        """Look from now on for a server of the task's program, if it may start one."""
        self._forget_ended()
        if task.request.watched and task.request.port is not None:
            self._add(task, task.request.port, _POLL_S)

    def serves(self, task: AgentTask, port: int) -> None:
        """Guard a server that the task has just started on ``port``."""
        if all((each.task, each.port) != (task, port) for each in self._watches):
            self._add(task, port, 0.0)

    def inodes(self) -> set[int]:
        """The inodes of our own listening sockets."""
        return {
            each.inode for watch in self._watches for each in watch.rejecting_listeners
        }

    def _add(self, task: AgentTask, port: int, delay_s: float) -> None:
        if not task.request.peers:
            return
        try:
            networks = peer_filter.parse(task.request.peers)
        except ValueError as error:
            self._give_up(task, port, str(error))
            return
        watch = _Watch(task, port, networks)
        watch.changed_s = self._loop.now()
        self._watches.append(watch)
        self._look_after(delay_s)

    def _look_after(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(delay_s, self._look)

    def _forget_ended(self) -> None:
        for watch in [each for each in self._watches if not each.task.running]:
            watch.open()
            self._watches.remove(watch)

    def _look(self) -> None:
        began_s = time.monotonic()
        self._forget_ended()
        if not self._watches:
            return
        ours = self.inodes()
        by_port: dict[int, set[int]] = {}
        for listener in listeners():
            if listener.inode not in ours:
                by_port.setdefault(listener.port, set()).add(listener.inode)
        now_s = self._loop.now()
        for watch in list(self._watches):
            fresh = now_s - watch.changed_s < _FRESH_S
            inodes = by_port.get(watch.port, set())
            if inodes != watch.listeners or (inodes and fresh):
                self._guard(watch, inodes, now_s)
        # A program may start a server at any time. Once it has one, it hardly ever
        # starts another one.
        quiet = all(
            each.listeners and now_s - each.changed_s >= _FRESH_S
            for each in self._watches
        )
        pause_s = max((time.monotonic() - began_s) / _POLL_SHARE, _POLL_S)
        self._look_after(_POLL_SLOW_S if quiet else pause_s)

    def _guard(self, watch: _Watch, listening: set[int], now_s: float) -> None:
        held = tcp_sockets.descriptors_of(self._tree(watch.task))
        own = listening & {each.inode for each in held}
        try:
            if own != watch.listeners:
                watch.open()
                self._reject_strangers(
                    watch, [each for each in held if each.inode in own]
                )
                watch.listeners, watch.changed_s = own, now_s
            if own:
                _cut_strangers(watch, tcp_sockets.duplicates(held))
        except OSError as error:
            watch.open()
            self._watches.remove(watch)
            self._give_up(watch.task, watch.port, error.strerror or str(error))

    def _reject_strangers(
        self, watch: _Watch, listeners: list[tcp_sockets.Descriptor]
    ) -> None:
        groups: dict[ListenerGroup, set[int]] = {}
        for each in tcp_sockets.duplicates(listeners):
            inode = os.fstat(each.fileno()).st_ino
            groups.setdefault(ListenerGroup.of(each), set()).add(inode)
        for group, members in groups.items():
            if not group.is_private:
                watch.rejecting_listeners.append(
                    RejectingListener(self._loop, group, len(members), watch.networks)
                )

    def _give_up(self, task: AgentTask, port: int, why: str) -> None:
        text = (
            f"warning: port {port} of {task.name} is open to any client, because "
            f"connections to it cannot be filtered: {why} (see SECURITY.md)"
        )
        self._channel.send(Note(text))


def _cut_strangers(watch: _Watch, found: Iterator[socket.socket]) -> None:
    """Cut the connections to the port that strangers made before it was guarded."""
    for each in found:
        if each.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        try:
            if each.getsockname()[1] != watch.port:
                continue
            peer = each.getpeername()[0]
        except OSError:
            continue  # it listens, or is no longer connected
        if not peer_filter.admits(watch.networks, peer):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other side was faster

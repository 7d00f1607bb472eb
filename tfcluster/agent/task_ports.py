"""Proves that the listener on a task's port is the task's own, and guards it.

A held port is taken with SO_REUSEPORT, by which another program of the user could share
it. A task that must listen is up once its listener is the only one. For one that may
listen, a single foreign listener may be its daemon's, but a second one is as bad.

TensorFlow's servers authenticate nobody. Once a task has one, or may have one, a
``RejectingListener`` rejects strangers, and their old connections are cut.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from array import array
from collections.abc import Iterable

from tfcluster.agent import proc
from tfcluster.agent.loop import Loop, Timer
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.task import AgentTask
from tfcluster.agent.tcp_sockets import (
    Descriptor,
    Listener,
    descriptors_of,
    duplicates,
    listeners,
)
from tfcluster.base import peer_filter
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.protocol.messages import Intruder, Listening, Note

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
        return self.host == "::1" or self.host.startswith("127.")


class RejectingListener:
    """Joins a group of ``count`` sockets, and lets only ``networks`` through to them.

    The kernel chooses one of the sockets that listen on a port with SO_REUSEPORT for
    each connection. A program in the kernel sends those of strangers to our socket.
    This needs no privileges. Raises OSError if it cannot join the group.
    """

    def __init__(
        self,
        loop: Loop,
        group: ListenerGroup,
        count: int,
        networks: tuple[peer_filter.Network, ...],
    ) -> None:
        self._loop = loop
        self._socket = socket.socket(group.family, socket.SOCK_STREAM)
        try:
            self._join(group)
            # struct sock_fprog: the number of instructions, and their address.
            code = array("B", peer_filter.program(networks, count))
            size, (address, _) = (
                len(code) // peer_filter.INSTRUCTION.size,
                code.buffer_info(),
            )
            argument = struct.pack("@HP", size, address)
            self._socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, argument
            )
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.inode = os.fstat(self._socket.fileno()).st_ino
        self._watch()

    def _join(self, group: ListenerGroup) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if group.family == socket.AF_INET6:
            self._socket.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(group.only_ipv6)
            )
        self._socket.bind((group.host, group.port))
        self._socket.listen()

    def close(self) -> None:
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


_POLL_FAST_S = 0.1  # for how long strangers may reach a server that was just started
_POLL_SLOW_S = 1.0
_POLL_SHARE = 0.02  # the largest share of the agent's time that polling may take
_FRESH_S = 3.0  # for how long after a change more listeners may follow


@dataclass(eq=False)
class _Watch:
    task: AgentTask
    port: int
    networks: tuple[peer_filter.Network, ...] | None = None
    """Who may connect; None: everybody."""
    proven: bool = True
    awaited: bool = False
    """The task must listen there."""
    suspects: set[int] = field(default_factory=set)
    """Inodes of the listeners of others when we looked last."""
    reported: set[tuple[int, bool]] = field(default_factory=set)
    """Inodes of suspects, and whether each was reported as an intruder."""
    listeners: set[int] = field(default_factory=set)
    """Inodes of the task's sockets that listen there, if they are guarded."""
    rejecting: list[RejectingListener] = field(default_factory=list)
    changed_s: float = 0.0
    """When the listeners last changed, by the loop's clock."""

    def open(self) -> None:
        for listener in self.rejecting:
            listener.close()
        self.rejecting.clear()

    def fresh(self, now_s: float) -> bool:
        return now_s - self.changed_s < _FRESH_S

    def urgent(self, now_s: float) -> bool:
        if self.networks is not None:
            return not self.listeners or self.fresh(now_s)
        return self.awaited and not self.proven


class TaskPorts:
    """Polls while a listener is not proven, or a task has a server or may have one."""

    def __init__(self, shared: RunServices) -> None:
        self._shared = shared
        self._loop = shared.loop
        self._channel = shared.channel
        self._watches: list[_Watch] = []
        self._timer: Timer | None = None

    def expect(self, task: AgentTask) -> None:
        """Look for the task's listener from now on, if it must or may have one."""
        request = task.request
        service = request.parameter_port
        if service is not None:
            self._add(_Watch(task, service, proven=False, awaited=request.listens))
        if request.port is not None and (request.listens or request.watched):
            # A parameter service starts TensorFlow's server only on request.
            awaited = request.listens and service is None
            watch = _Watch(task, request.port, proven=False, awaited=awaited)
            if request.watched:
                self._limit(watch)
            self._add(watch)

    def serves(self, task: AgentTask, port: int) -> None:
        """Guard a server that the task has just started on ``port``."""
        own = (w for w in self._watches if (w.task, w.port) == (task, port))
        watch = next(own, None)
        if watch is None:
            watch = _Watch(task, port)
            self._add(watch)
        if watch.networks is None:
            self._limit(watch)
            self._poll_in(0.0)

    def _add(self, watch: _Watch) -> None:
        watch.changed_s = self._loop.now()
        self._watches.append(watch)
        self._poll_in(_POLL_FAST_S)

    def _limit(self, watch: _Watch) -> None:
        if watch.task.request.peers:
            try:
                watch.networks = peer_filter.parse(watch.task.request.peers)
            except ValueError as error:
                self._warn_open(watch, str(error))

    def _poll_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(delay_s, self._poll)

    def _poll(self) -> None:
        began_s = time.monotonic()
        for watch in self._watches:
            if not watch.task.running:
                watch.open()
        self._watches = [w for w in self._watches if w.task.running]
        ours = {r.inode for watch in self._watches for r in watch.rejecting}
        by_port: dict[int, list[Listener]] = {}
        for listener in listeners() if self._watches else ():
            if listener.inode not in ours:
                by_port.setdefault(listener.port, []).append(listener)
        for watch in self._watches:
            self._check(watch, by_port.get(watch.port, []))
        self._watches = [w for w in self._watches if w.networks or not w.proven]
        if self._watches:
            now_s = self._loop.now()
            urgent = any(watch.urgent(now_s) for watch in self._watches)
            cost_s = time.monotonic() - began_s
            pause_s = _POLL_FAST_S if urgent else _POLL_SLOW_S
            self._poll_in(max(cost_s / _POLL_SHARE, pause_s))

    def _check(self, watch: _Watch, listening: list[Listener]) -> None:
        inodes = {listener.inode for listener in listening}
        if not inodes and not watch.listeners:
            return
        fresh = watch.fresh(self._loop.now())
        if watch.proven and inodes == watch.listeners and not fresh:
            return
        held = descriptors_of(self._tree(watch.task))
        own = inodes & {descriptor.inode for descriptor in held}
        if watch.networks is not None:
            self._guard(watch, held, own)
        # A task that was told to end may have let go of its listener already, which
        # then seems to be somebody else's.
        if inodes and not watch.proven and not watch.task.stopped:
            self._prove(watch, listening, own)

    def _tree(self, task: AgentTask) -> set[int]:
        """The pids of the task, with adopted orphans if its script may listen."""
        leader = task.process_id
        if leader is None:
            return set()
        table = proc.snapshot()
        roots = {leader}
        if task.request.watched:
            roots |= {p.pid for p in table.values() if p.ppid == os.getpid()}
            roots -= {*self._shared.children.expected} - {leader}
        return proc.family(table, roots, [leader])

    def _prove(self, watch: _Watch, listening: list[Listener], own: set[int]) -> None:
        strange = [entry for entry in listening if entry.inode not in own]
        intrudes = watch.awaited or bool(own)
        for entry in strange:
            # Only if it is seen twice: the first time, it may just be closing.
            report = entry.inode, intrudes
            if entry.inode in watch.suspects and report not in watch.reported:
                watch.reported.add(report)
                self._report(watch, entry, intrudes=intrudes)
        watch.suspects = {entry.inode for entry in strange}
        if not strange:
            watch.proven = True
            self._channel.send(Listening(*watch.task.key, port=watch.port))

    def _report(self, watch: _Watch, entry: Listener, *, intrudes: bool) -> None:
        sockets = descriptors_of(proc.snapshot())
        pid = next((s.pid for s in sockets if s.inode == entry.inode), None)
        if intrudes:
            self._channel.send(Intruder(*watch.task.key, watch.port, pid, entry.uid))
            return
        who = f"a process of uid {entry.uid}" if pid is None else f"pid {pid}"
        text = (
            f"warning: {who}, which {watch.task.name} did not start, listens on port "
            f"{watch.port} of that task"
        )
        self._channel.send(Note(text))

    def _guard(self, watch: _Watch, held: list[Descriptor], own: set[int]) -> None:
        try:
            if own != watch.listeners:
                watch.open()
                self._reject_strangers(watch, [d for d in held if d.inode in own])
                watch.listeners, watch.changed_s = own, self._loop.now()
            if own:
                _cut_strangers(watch, duplicates(held))
        except OSError as error:
            watch.open()
            watch.networks, watch.listeners = None, set()
            self._warn_open(watch, error.strerror or str(error))

    def _reject_strangers(self, watch: _Watch, own: list[Descriptor]) -> None:
        groups: dict[ListenerGroup, set[int]] = {}
        for listener in duplicates(own):
            inode = os.fstat(listener.fileno()).st_ino
            groups.setdefault(ListenerGroup.of(listener), set()).add(inode)
        for group, members in groups.items():
            if not group.is_private:
                networks = watch.networks or ()
                watch.rejecting.append(
                    RejectingListener(self._loop, group, len(members), networks)
                )

    def _warn_open(self, watch: _Watch, cause: str) -> None:
        text = (
            f"warning: port {watch.port} of {watch.task.name} is open to any client, "
            f"because connections to it cannot be filtered: {cause} (see SECURITY.md)"
        )
        self._channel.send(Note(text))


def _cut_strangers(watch: _Watch, sockets: Iterable[socket.socket]) -> None:
    """Cut the connections to the port that strangers made before it was guarded."""
    for connection in sockets:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        try:
            if connection.getsockname()[1] == watch.port and not peer_filter.admits(
                watch.networks or (), connection.getpeername()[0]
            ):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it listens, or is no longer connected

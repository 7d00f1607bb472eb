"""Keeps strangers out of TensorFlow's servers, which authenticate nobody.

A runtime tells the agent that it has started a server. For a program without a runtime,
the agent checks from time to time whether the program listens on its task's port. In
both cases, a ``RejectingListener`` rejects strangers from then on, and the connections
that they already have are cut.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

from tfcluster import peer_filter
from tfcluster.agent import task_sockets
from tfcluster.agent.constants import (
    GUARD_FRESH_S,
    GUARD_POLL_S,
    GUARD_POLL_SHARE,
    GUARD_POLL_SLOW_S,
)
from tfcluster.agent.listening_sockets import listeners
from tfcluster.agent.loop import Loop, Timer
from tfcluster.agent.rejecting_listener import ListenerGroup, RejectingListener
from tfcluster.agent.task import AgentTask
from tfcluster.light_dataclasses import dataclass, field
from tfcluster.protocol.messages import Note

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from tfcluster.agent.tasks import Reports
    from tfcluster.peer_filter import Network


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
        self, loop: Loop, reports: Reports, tree: Callable[[AgentTask], set[int]]
    ) -> None:
        self._loop = loop
        self._reports = reports
        self._tree = tree
        self._watches: list[_Watch] = []
        self._timer: Timer | None = None

    def expect(self, task: AgentTask) -> None:
        """Look from now on for a server of the task's program, if it may start one."""
        self._forget_ended()
        if task.request.watched and task.request.port is not None:
            self._add(task, task.request.port, GUARD_POLL_S)

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
            fresh = now_s - watch.changed_s < GUARD_FRESH_S
            found = by_port.get(watch.port, set())
            if found != watch.listeners or (found and fresh):
                self._guard(watch, found, now_s)
        # A program may start a server at any time. Once it has one, it hardly ever
        # starts another one.
        quiet = all(
            each.listeners and now_s - each.changed_s >= GUARD_FRESH_S
            for each in self._watches
        )
        pause_s = max((time.monotonic() - began_s) / GUARD_POLL_SHARE, GUARD_POLL_S)
        self._look_after(GUARD_POLL_SLOW_S if quiet else pause_s)

    def _guard(self, watch: _Watch, listening: set[int], now_s: float) -> None:
        held = task_sockets.descriptors_of(self._tree(watch.task))
        own = listening & {each.inode for each in held}
        try:
            if own != watch.listeners:
                watch.open()
                self._reject_strangers(
                    watch, [each for each in held if each.inode in own]
                )
                watch.listeners, watch.changed_s = own, now_s
            if own:
                _cut_strangers(watch, task_sockets.duplicates(held))
        except OSError as error:
            watch.open()
            self._watches.remove(watch)
            self._give_up(watch.task, watch.port, error.strerror or str(error))

    def _reject_strangers(
        self, watch: _Watch, listeners: list[task_sockets.Descriptor]
    ) -> None:
        groups: dict[ListenerGroup, set[int]] = {}
        for each in task_sockets.duplicates(listeners):
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
        self._reports.send(Note(text))


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

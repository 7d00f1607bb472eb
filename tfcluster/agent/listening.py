"""Proves that the listener on a task's port is the task's own.

A task takes a held port with SO_REUSEPORT, which would also let another program of the
same user silently share the port. A task that must listen is not up before its listener
is the only one. For a task that may listen, a second listener beside its own is just as
bad; but a single listener of a foreign process may still be the task's, started by a
daemon on its behalf. Knows ports and processes; starts and stops nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.agent import proc
from tfcluster.agent.channel import Channel
from tfcluster.agent.loop import Loop, Timer
from tfcluster.agent.task import AgentTask
from tfcluster.agent.tcp_sockets import Listener, descriptors_of, listeners
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.protocol import messages
from tfcluster.protocol.messages import Intruder, Note

_POLL_S = 0.05
_POLL_MAX_S = 2.0
_POLL_IDLE_S = 10.0  # if no task has to listen, and perhaps none ever will
_SLOWER = 1.4


@dataclass(eq=False)
class _Watch:
    task: AgentTask
    port: int
    awaited: bool
    """The task must listen there."""
    suspects: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    noted: set[int] = field(default_factory=set)


class ListenerWatch:
    """Polls as long as there is a task whose listener is not proven yet."""

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        tree: Callable[[AgentTask], set[int]],
        ours: Callable[[], set[int]],
    ) -> None:
        self._loop = loop
        self._ours = ours
        self._channel = channel
        self._tree = tree
        self._watches: list[_Watch] = []
        self._delay_s = _POLL_S
        self._timer: Timer | None = None

    def expect(self, task: AgentTask) -> None:
        """Look for the task's listener from now on, if it must or may have one."""
        request, wanted = task.request, []
        service = request.parameter_port
        if service is not None:
            wanted.append(_Watch(task, service, awaited=request.listens))
        if request.port is not None and (request.listens or request.watched):
            # A parameter service starts TensorFlow's server only on request.
            awaited = request.listens and service is None
            wanted.append(_Watch(task, request.port, awaited=awaited))
        if wanted:
            self._watches += wanted
            self._delay_s = _POLL_S
            self._again()

    def _again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(self._delay_s, self._look)

    def _look(self) -> None:
        self._watches = [w for w in self._watches if w.task.running]
        by_port: dict[int, list[Listener]] = {}
        for listener in listeners() if self._watches else ():
            by_port.setdefault(listener.port, []).append(listener)
        self._watches = [
            watch for watch in self._watches if not self._proven(watch, by_port)
        ]
        if self._watches:
            awaited = any(watch.awaited for watch in self._watches)
            slowest_s = _POLL_MAX_S if awaited else _POLL_IDLE_S
            self._delay_s = min(self._delay_s * _SLOWER, slowest_s)
            self._again()

    def _proven(self, watch: _Watch, by_port: dict[int, list[Listener]]) -> bool:
        ours = self._ours()
        listeners = [e for e in by_port.get(watch.port, []) if e.inode not in ours]
        if not listeners:
            return False
        own = {each.inode for each in descriptors_of(self._tree(watch.task))}
        strange = {entry for entry in listeners if entry.inode not in own}
        inodes = {entry.inode for entry in strange}
        shared = watch.awaited or len(strange) < len(listeners)
        told = watch.reported if shared else watch.noted
        for entry in strange:
            # Only if it is seen twice: the first time, it may just be closing.
            if entry.inode in watch.suspects - told:
                told.add(entry.inode)
                self._tell(watch, entry, shared=shared)
        watch.suspects = inodes
        if strange:
            return False
        self._channel.send(messages.Listening(*watch.task.key, port=watch.port))
        return True

    def _tell(self, watch: _Watch, entry: Listener, *, shared: bool) -> None:
        pid = _owner(entry.inode)
        if shared:
            told = Intruder(*watch.task.key, port=watch.port, pid=pid, uid=entry.uid)
            self._channel.send(told)
            return
        who = f"a process of uid {entry.uid}" if pid is None else f"pid {pid}"
        text = (
            f"warning: {who}, which {watch.task.name} did not start, listens on port "
            f"{watch.port} of that task"
        )
        self._channel.send(Note(text))


def _owner(inode: int) -> int | None:
    wanted = f"socket:[{inode}]"
    for pid in proc.snapshot():
        if wanted in proc.descriptors(pid):
            return pid
    return None

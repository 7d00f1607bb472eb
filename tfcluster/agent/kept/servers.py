"""The servers of this agent's run: forks of a kept interpreter that fork its tasks.

Each replaces a warm interpreter that would otherwise be started.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

from tfcluster.agent.kept.agent_link import NewEnd, Server
from tfcluster.agent.kept.fitness import Wanted, misfit, text_environment
from tfcluster.agent.kept.handover import summary
from tfcluster.agent.signals import send_group
from tfcluster.agent.spawn import Program
from tfcluster.wire import WireError, encode


class Servers:
    """The servers that are not in use yet."""

    def __init__(self, lent: NewEnd | None, say: Callable[[str], None]) -> None:
        self._about = {} if lent is None else lent.about
        self._unused = [] if lent is None else list(lent.servers)
        self._ending: set[int] = set()
        self._say = say
        self.kept = {} if lent is None else summary(lent.about)
        """The description of the interpreter that forked them, for the launcher."""

    def take(self, program: Program, output: int) -> Server | None:
        """A server that fits. It gets the program's environment, and writes its own
        messages to ``output``. None: there is none, and the reason was reported."""
        if not self._unused:
            return None
        reason = misfit(self._about, Wanted(program.argv, program.env))
        if reason is None:
            server = self._unused.pop()
            frame = {"type": "become", "env": text_environment(program.env)}
            try:
                line = encode(frame)
                sent = socket.send_fds(server.end, [line], [output])
                server.end.sendall(line[sent:])
            except (OSError, WireError) as error:
                reason = str(error)
                self._end(server)
            else:
                return server
        pid = self._about.get("pid")
        self._say(f"the kept interpreter with pid {pid} is not used: {reason}")
        return None

    def close(self) -> None:
        """End the servers that are not in use."""
        while self._unused:
            self._end(self._unused.pop())

    def ended(self, pid: int) -> bool:
        """Note that a child was reaped; returns whether it was an unused server."""
        for server in self._unused:
            if server.pid == pid:
                server.end.close()
                self._unused.remove(server)
                return True
        known = pid in self._ending
        self._ending.discard(pid)
        return known

    @property
    def over(self) -> bool:
        return not self._unused and not self._ending

    def _end(self, server: Server) -> None:
        server.end.close()
        self._ending.add(server.pid)
        send_group(server.pid, signal.SIGKILL)

"""Entry points of the guard and the agent that descend from a kept interpreter.

The interpreter has forked them, and they have executed this module. Their arguments are
descriptors.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from tfcluster.agent.guard import GuardSocket, become_agent, watch
from tfcluster.agent.kept.agent_link import NewEnd, Server, say_code
from tfcluster.agent.signals import adopt_orphans


def main(argv: Sequence[str]) -> int:
    role, words = argv[0], argv[1:]
    return _guard(*words) if role == "guard" else _agent(*words)


def _guard(agent: str, link: str, end: str) -> int:
    adopt_orphans()
    code = watch(int(agent), _inherited(end))
    say_code(int(link), code)
    return code


def _agent(guard: str, link: str, end: str, *servers: str) -> int:
    from tfcluster.agent.supervisor import serve

    pairs = (word.split(":") for word in servers)
    forks = [Server(int(pid), _inherited(fd)) for pid, fd in pairs]
    link_end = _inherited(link)

    def supervise(guard_socket: GuardSocket) -> int:
        code = serve(guard_socket, NewEnd(link_end, forks))
        say_code(link_end.fileno(), code)
        return code

    become_agent(supervise, GuardSocket(_inherited(end), int(guard)))


def _inherited(word: str) -> socket.socket:
    end = socket.socket(fileno=int(word))
    end.set_inheritable(False)
    return end

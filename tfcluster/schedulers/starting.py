"""How agents start: the channel to one, and what starts it on a host.

Separate from ``base``, because some users want a scheduler's hosts but another way to
start agents on them.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tfcluster.plan.model import Host


class AgentChannel(Protocol):
    """The standard input and output of a process that runs on a host."""

    def fileno(self) -> int:
        """A descriptor that can be polled: it is readable when there is output."""

    def read(self) -> bytes:
        """The next bytes; blocks until there are some. Empty at the end."""

    def has_unread(self) -> bool:
        """Whether unread data, or the end, has arrived on this machine."""

    def write(self, data: bytes) -> None:
        """Write all of ``data``; blocks. Raises OSError if nobody reads."""

    def close(self) -> None:
        """Send end of file to the other side, which then exits by itself."""

    def kill(self) -> None:
        """End the connection now, and kill as much of the process as possible."""

    def diagnosis(self) -> str:
        """Why the process ended: exit status and last line of stderr; "" if unknown."""


class Starter(Protocol):
    def start_agent(self, host: Host) -> AgentChannel:
        """Start an agent on ``host`` and send it what must precede frames.

        Blocks while connecting; called from threads, for several hosts in parallel.
        Raises HostError or StartError.
        """


def is_readable(descriptor: int) -> bool:
    """Whether data or an end can be read from a descriptor. False if it is closed."""
    poll = select.poll()
    try:
        poll.register(descriptor, select.POLLIN)
    except ValueError:  # a closed file or socket has -1
        return False
    return any(not event & select.POLLNVAL for _, event in poll.poll(0))


@runtime_checkable
class StartsTogether(Protocol):
    """A starter that starts the agents of many hosts together at less cost."""

    def expect(self, hosts: Sequence[Host]) -> None:
        """Expect ``start_agent`` calls for all ``hosts`` soon; never blocks."""


@runtime_checkable
class ReachabilityProbe(Protocol):
    """A starter that reaches hosts over a network, and can check on them."""

    def answers(self, host: Host) -> bool:
        """Whether the host answers anew within ``ANSWER_S``. From threads."""


ANSWER_S = 2.0

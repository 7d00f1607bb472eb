"""The protocols of a backend: which hosts there are, and how to start agents there.

They are separate, because some users want a scheduler's hosts but another way to start
agents on them.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tfcluster.errors import ExitCode
from tfcluster.model import Allocation, Description, Host


class Channel(Protocol):
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
    def start_agent(self, host: Host) -> Channel:
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
        """Whether the host answers on a new connection, within ``ANSWER_S``.

        Called from threads.
        """


ANSWER_S = 2.0


class Backend(Protocol):
    """Provides hosts and a starter. ``env`` is the launcher's environment."""

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        """The hosts for this run. Raises HostError or StartError."""

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        """The starter of agents on these hosts. Raises HostError or StartError."""


@runtime_checkable
class Remembering(Protocol):
    """A backend whose hosts outlive the launcher and can be reached again later."""

    def remember(self, description: Description) -> Mapping[str, Any]:
        """What is needed to reach the hosts again, as JSON; nothing secret."""

    def return_to(
        self, found: Mapping[str, Any], env: Mapping[str, str]
    ) -> tuple[tuple[Host, ...], Starter]:
        """The hosts and a starter, from the result of ``remember``.

        Raises HostError or ContactLostError.
        """


@runtime_checkable
class Scheduled(Protocol):
    """A backend whose hosts belong to a job of a scheduler."""

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """How many seconds tasks have for their end before the scheduler kills them.

        None: unknown.
        """

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """Why the scheduler ends the job: preemption or time limit; None: it does not.

        Called when the launcher has received SIGTERM; takes a few seconds at most.
        """

    def array_index(self, env: Mapping[str, str]) -> str | None:
        """The index of this element of a job array; None: not in an array."""

    def harmless_signals(self, description: Description) -> frozenset[signal.Signals]:
        """Signals of the scheduler that do not announce the end of the job."""


@runtime_checkable
class Requeuing(Protocol):
    """A backend whose scheduler can restart a job that has ended."""

    def job(self, env: Mapping[str, str]) -> str:
        """The id of the job that we are in."""

    def is_started_again(self, env: Mapping[str, str]) -> bool:
        """Whether the job has run before."""

    def require_requeuable(self, env: Mapping[str, str]) -> None:
        """Raise StartError if the scheduler would not start the job again."""

    def requeue(self, env: Mapping[str, str]) -> str | None:
        """Have the scheduler end the job and start it again; returns why it refuses.

        None: it obeys, and will soon tell this process to end.
        """

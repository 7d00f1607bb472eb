"""What a backend answers: which hosts, and how to start an agent on one of them.

The two questions are separate protocols, because people want one scheduler's hosts with
another one's launch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tfcluster.errors import ExitCode
from tfcluster.model import Allocation, Description, Host


class Channel(Protocol):
    """The standard input and output of a process that runs on a host."""

    def read(self) -> bytes:
        """The next bytes, waiting for them; empty at the end."""

    def write(self, data: bytes) -> None:
        """All of ``data``, waiting for room. Raises OSError where nobody reads."""

    def close(self) -> None:
        """End of file to the other side, which then ends by itself."""

    def kill(self) -> None:
        """End the contact now, and whatever of the process is within reach."""

    def diagnosis(self) -> str:
        """What is known of why it ended: exit status and last words; may be empty."""


class Starter(Protocol):
    def start_agent(self, host: Host) -> Channel:
        """Start an agent on ``host`` and send what has to come before frames.

        May take as long as connecting takes; is called from threads, for several hosts
        at a time. Raises HostError or StartError.
        """


@runtime_checkable
class Asking(Protocol):
    """What a starter can do beyond that where hosts are reached over a network."""

    def answers(self, host: Host) -> bool:
        """Whether the host answers to somebody new, within ``ANSWER_S``.

        Called from threads.
        """


ANSWER_S = 2.0


class Backend(Protocol):
    """Both answers. ``env`` is the launcher's environment, handed in."""

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        """The hosts that there are for this run. Raises HostError or StartError."""

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        """How agents are started on them."""


@runtime_checkable
class Remembering(Protocol):
    """What a backend can say beyond that where its hosts outlive the launcher."""

    def remember(self, description: Description) -> Mapping[str, Any]:
        """What it takes to reach the hosts again, as JSON; nothing secret."""

    def return_to(
        self, found: Mapping[str, Any], env: Mapping[str, str]
    ) -> tuple[tuple[Host, ...], Starter]:
        """The hosts, and how agents are started on them, from what was remembered.

        Raises HostError or ContactLostError.
        """


@runtime_checkable
class Scheduled(Protocol):
    """What a backend can say beyond that where a scheduler has lent us the hosts."""

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """How long tasks may take to end before the scheduler kills them.

        Seconds; None: nobody says.
        """

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """Why the scheduler ends the job, if that is for a reason of its own.

        Asked when the launcher was sent SIGTERM; takes a few seconds at most.
        """

    def array_index(self, env: Mapping[str, str]) -> str | None:
        """Which element of a job array this is; None: of none."""

    def harmless_signals(self, description: Description) -> frozenset[signal.Signals]:
        """Signals by which the scheduler does not mean that the end is near."""

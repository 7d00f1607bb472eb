"""A request of a command to the launcher of a run, which answers in the record."""

from __future__ import annotations

import time

from tfcluster.errors import ContactLostError
from tfcluster.protocol.commands import Command
from tfcluster.record.events import Event, EventReader
from tfcluster.record.paths import RunPaths
from tfcluster.record.requests import ask, withdraw

ASKED_S = 15.0
"""How long the launcher may take to see the request; the folder may be on NFS."""
_POLL_S = 0.05


class LauncherRequest:
    """A request that has been left for the launcher."""

    def __init__(self, paths: RunPaths, request: Command) -> None:
        self._paths = paths
        self._events = EventReader(paths.events)
        self._events.read()  # earlier ones
        self.number = ask(paths, request)
        self._until_s = time.monotonic() + ASKED_S

    def wait(self) -> list[Event]:
        """The events since the last call, after a short while."""
        time.sleep(_POLL_S)  # another process writes them
        return self._events.read()

    def require_answer(self) -> None:
        """Raise ContactLostError if the launcher should have answered by now."""
        if time.monotonic() > self._until_s:
            self.withdraw()
            run = self._paths.run
            raise ContactLostError(
                f"the launcher of {run} does not answer",
                hint=f"`tfcluster status {run}` tells whether it is alive",
            )

    def withdraw(self) -> None:
        """Remove the request, if nobody has taken it."""
        withdraw(self._paths, self.number)

"""Records the outcome of fetches, and tells the person who launched the run."""

from __future__ import annotations

import threading
import time

from tfcluster.console.views.results import result_lines
from tfcluster.launcher.journal import Journal
from tfcluster.launcher.result_transfer import TransferOutcome
from tfcluster.launcher.results import HostFetch, ResultsFetcher, event_fields
from tfcluster.launcher.run_output import RunOutput
from tfcluster.protocol import commands
from tfcluster.protocol.messages import Message
from tfcluster.record.replay import results_view

CLOSE_S = 2.0
"""How long fetches may take to end when the run is over."""
_POLL_S = 0.02


class ResultRecorder:
    """The results of a run, with their events in the record."""

    def __init__(
        self, results: ResultsFetcher, journal: Journal, show: RunOutput
    ) -> None:
        self._results = results
        self._journal = journal
        self._show = show
        self._final: HostFetch | None = None

    def received(self, host: str, message: Message) -> bool:
        """Take a message if it is about results; returns whether it was."""
        return self._results.received(host, message)

    def lost(self, host: str, cause: str) -> None:
        """Note that we have lost contact with a host."""
        self._results.lost(host, cause)

    def text(self) -> str | None:
        """The progress of the current fetch; None if nothing is being fetched."""
        return self._results.text()

    def begin(self, number: str | None, request: commands.Fetch) -> HostFetch:
        """Begin a fetch; events ``results`` follow, one for each host."""
        fetch = self._results.begin(number, request)
        hosts = list(fetch.outcomes)
        self._journal.event("fetch", request=number, hosts=hosts)
        return fetch

    def at_end(self, not_now: str | None) -> None:
        """Begin the fetch at the end of the run, or say why there is none."""
        if not_now is None:
            self._final = self.begin(None, commands.Fetch())
            return
        self._results.leave(not_now)
        for outcome in self._results.skip(not_now):
            self._tell(outcome, None)

    def leave(self, why: str) -> None:
        """End all fetches soon."""
        self._results.leave(why)

    def close(self) -> None:
        """End all fetches, and record what they have achieved by then."""
        self._results.leave("the run has ended")
        until, pause = time.monotonic() + CLOSE_S, threading.Event()
        while self._results.text() is not None and time.monotonic() < until:
            self.finished(time.monotonic())
            pause.wait(_POLL_S)

    def finished(self, now_s: float) -> bool:
        """Record the fetches that have ended; returns whether the one at the end of the
        run is among them."""
        final = False
        for fetch in self._results.finished(now_s):
            final = final or fetch is self._final
            for outcome in fetch.outcomes.values():
                self._tell(outcome, fetch.number)
        return final

    def _tell(self, outcome: TransferOutcome, number: str | None) -> None:
        folder = self._results.folder
        fields = event_fields(outcome, number, folder)
        self._journal.event("results", **fields)
        if number is not None or outcome.shared:
            return
        for line in result_lines(results_view(fields)):
            self._show.say(line)
        if outcome.cause is not None and self._results.reachable_later:
            self._show.say(f"  hint: tfcluster fetch {self._results.run}")

"""What ranks that don't wait for each other leave for one another, as notes on a ps.

How many epochs each has done, that the chief has stopped or ended a ``fit``, and what
it has written. A program that is restarted finds its own notes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from tfcluster.runtime.collective import CollectiveError, CollectiveTimeoutError
from tfcluster.runtime.parameter_server.client import ParameterServerClient

_LOOK_EVERY_S = 0.5
_WAIT_S = 0.05
_FOREVER_S = 20 * 86400.0


class Progress:
    """The notes of one rank. ``warn`` tells whoever waits for long why."""

    def __init__(
        self,
        servers: Callable[[], ParameterServerClient],
        rank: int,
        *,
        restarted: bool,
        timeout_s: float | None,
        warning_s: float | None,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = servers
        self._rank = rank
        self.restarted = restarted
        self._timeout_s = timeout_s or _FOREVER_S
        self._warning_s = warning_s or _FOREVER_S
        self._warn = warn
        self._clock = clock
        self._fits = 0
        self._writings = 0
        self._looked = 0.0
        self._stopped = False

    def begin_fit(self) -> None:
        self._fits += 1
        self._stopped = False
        self._looked = self._clock()

    def epochs_done(self) -> int:
        """Of this ``fit``, by this rank, in a life before this one."""
        return int(self._servers().get(self._key("epochs", self._rank)) or 0)

    def epoch_done(self, epochs: int) -> None:
        self._servers().put(self._key("epochs", self._rank), str(epochs))

    def stop(self) -> None:
        """The chief's callbacks have had enough."""
        self._servers().put(self._key("stop"), "stop")

    def chief_has_stopped(self, *, at_once: bool) -> bool:
        """Whether it has; asked again only now and then, where not ``at_once``."""
        now = self._clock()
        if not self._stopped and (at_once or now - self._looked >= _LOOK_EVERY_S):
            self._looked = now
            self._stopped = self._servers().get(self._key("stop")) is not None
        return self._stopped

    def end_fit(self) -> None:
        """The chief says so; the others wait for that, so that its files are there."""
        if self._rank == 0:
            self._servers().put(self._key("end"), "end")
        else:
            self._wait(self._key("end"), f"end of its fit number {self._fits}")

    def written(self, result: str, error: str = "") -> None:
        """The chief has saved something, outside of ``fit``."""
        self._writings += 1
        text = json.dumps([result, error])
        self._servers().put(f"written/{self._writings}", text)

    def wait_for_writing(self) -> str | None:
        """Until the chief has saved as many times as this rank would have."""
        self._writings += 1
        key = f"written/{self._writings}"
        result, error = json.loads(self._wait(key, f"saving number {self._writings}"))
        if error:
            raise CollectiveError(error)
        return result or None

    def _key(self, what: str, *more: int) -> str:
        return "/".join(["fit", str(self._fits), what, *map(str, more)])

    def _wait(self, key: str, what: str) -> str:
        began = self._clock()
        warned = False
        pause = threading.Event()
        while True:
            text = self._servers().get(key)
            if text is not None:
                return text
            waited_s = self._clock() - began
            if waited_s > self._timeout_s:
                raise CollectiveTimeoutError(
                    f"the chief has not reached the {what} (waiting for {waited_s:.0f} "
                    "s)"
                )
            if waited_s > self._warning_s and not warned:
                warned = True
                self._warn(
                    f"the chief has not reached the {what} (waiting for {waited_s:.0f} "
                    "s)"
                )
            pause.wait(_WAIT_S)

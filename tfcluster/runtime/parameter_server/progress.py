"""How ranks that train asynchronously inform each other: notes on a ps task.

The notes say how many epochs each rank has done, which ranks have pushed their last
gradient of a ``fit`` or of a loop, whether the chief has stopped or ended it, and what
the chief has saved. A restarted program finds its own notes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from tfcluster.runtime.collective import CollectiveError, CollectiveTimeoutError
from tfcluster.runtime.parameter_server.client import ParameterServerClient

_ASK_EVERY_S = 0.5
_WAIT_S = 0.05
_FOREVER_S = 20 * 86400.0
_NO_MORE = 10**9


class StepNotes:
    """The notes of one rank. ``warn`` is called when a wait exceeds ``warning_s``.

    A wait fails after ``timeout_s``. Both are in seconds; None means no limit.
    """

    def __init__(
        self,
        servers: Callable[[], ParameterServerClient],
        rank: int,
        size: int,
        *,
        restarted: bool,
        timeout_s: float | None,
        warning_s: float | None,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = servers
        self._rank = rank
        self._size = size
        self.restarted = restarted
        self._timeout_s = timeout_s or _FOREVER_S
        self._warning_s = warning_s or _FOREVER_S
        self._warn = warn
        self._clock = clock
        self._fits = 0
        self._writings = 0
        self._loops = 0
        self._asked = 0.0
        self._stopped = False

    def begin_fit(self) -> None:
        """Begin a new ``fit``; its notes are separate from those of earlier calls."""
        self._fits += 1
        self._stopped = False
        self._asked = self._clock()

    def epochs_done(self) -> int:
        """Epochs of this ``fit`` that this rank completed before it was restarted."""
        return int(self._servers().get(self._key("epochs", self._rank)) or 0)

    def epoch_done(self, epochs: int) -> None:
        """Note that this rank has completed ``epochs`` epochs of this ``fit``."""
        self._servers().put(self._key("epochs", self._rank), str(epochs))

    def stop(self) -> None:
        """Note that the chief's callbacks have stopped training."""
        self._servers().put(self._key("stop"), "stop")

    def chief_has_stopped(self, *, at_once: bool) -> bool:
        """Whether the chief has stopped.

        Unless ``at_once``, asks at most every half second, and otherwise repeats the
        last answer.
        """
        now = self._clock()
        if not self._stopped and (at_once or now - self._asked >= _ASK_EVERY_S):
            self._asked = now
            self._stopped = self._servers().get(self._key("stop")) is not None
        return self._stopped

    def has_trained(self) -> None:
        """Note that this rank has pushed its last gradient of this ``fit``."""
        self._servers().put(self._key("trained", self._rank), "trained")

    def await_trained(self) -> None:
        """Wait until all ranks have pushed their last gradients of this ``fit``.

        Then the weights on the ps tasks include all batches. A rank that is lost before
        this point is restarted, or the run fails. Raises CollectiveTimeoutError if a
        rank does not arrive in time.
        """
        for rank in range(self._size):
            what = f"last step of its fit number {self._fits}"
            self._wait(self._key("trained", rank), what, rank)

    def await_loops(self) -> None:
        """Wait until all ranks have called this equally often, or have ended.

        A rank calls this when its program reads the weights after its own loop. Then
        the weights on the ps tasks include all batches of the loop. Raises
        CollectiveTimeoutError if a rank does not arrive in time.
        """
        self._loops += 1
        number = self._loops
        self._servers().put(f"loops/{self._rank}", str(number))
        for rank in range(self._size):
            self._wait(
                f"loops/{rank}",
                f"end of its training loop number {number}",
                rank,
                until=lambda text: int(text) >= number,
            )

    def program_ended(self) -> None:
        """Note that this rank's program has ended; no rank waits for its loops."""
        if self._loops:
            self._servers().put(f"loops/{self._rank}", str(_NO_MORE))

    def end_fit(self) -> None:
        """Note that the chief has ended ``fit``; other ranks wait for this note.

        So they also wait for the chief's files. Raises CollectiveTimeoutError if the
        chief does not end in time.
        """
        if self._rank == 0:
            self._servers().put(self._key("end"), "end")
        else:
            self._wait(self._key("end"), f"end of its fit number {self._fits}")

    def written(self, result: str, error: str = "") -> None:
        """Note that the chief has saved something outside of ``fit``.

        ``result`` is the saving function's result, or "" if that was not a string;
        ``error`` is the message of an exception.
        """
        self._writings += 1
        text = json.dumps([result, error])
        self._servers().put(f"written/{self._writings}", text)

    def wait_for_writing(self) -> str | None:
        """Wait until the chief has saved as often as this rank would have.

        Returns the chief's result, or None if it was "". Raises CollectiveError if the
        chief could not save, and CollectiveTimeoutError if it does not save in time.
        """
        self._writings += 1
        key = f"written/{self._writings}"
        result, error = json.loads(self._wait(key, f"saving number {self._writings}"))
        if error:
            raise CollectiveError(error)
        return result or None

    def abandon_fit(self) -> None:
        """Note that this rank's ``fit`` failed, so that no rank waits for it."""
        self.has_trained()
        if self._rank == 0:
            self._servers().put(self._key("end"), "error")

    def _key(self, what: str, *more: int) -> str:
        return "/".join(["fit", str(self._fits), what, *map(str, more)])

    def _wait(
        self,
        key: str,
        what: str,
        rank: int = 0,
        until: Callable[[str], bool] = lambda text: True,
    ) -> str:
        who = f"rank {rank}" if rank else "the chief"
        began = self._clock()
        warned = False
        pause = threading.Event()
        while True:
            text = self._servers().get(key)
            if text is not None and until(text):
                return text
            waited_s = self._clock() - began
            if waited_s > self._timeout_s:
                raise CollectiveTimeoutError(
                    f"{who} has not reached the {what} (waiting for {waited_s:.0f} s)"
                )
            if waited_s > self._warning_s and not warned:
                warned = True
                self._warn(
                    f"{who} has not reached the {what} (waiting for {waited_s:.0f} s)"
                )
            pause.wait(_WAIT_S)

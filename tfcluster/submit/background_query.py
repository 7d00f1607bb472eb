"""Asking a scheduler without waiting for it: its controller may be away for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from tfcluster.submit.scheduler import SchedulerError

Found = TypeVar("Found")


class BackgroundQuery(Generic[Found]):
    """A question that is asked in the background, again and again, once at a time."""

    def __init__(self, question: Callable[[], Found]) -> None:
        self._question = question
        self._answers: SimpleQueue[Found | SchedulerError] = SimpleQueue()
        self.open = False
        """It was asked, and its answer not taken yet."""

    def begin(self) -> None:
        self.open = True
        # A daemon: whoever leaves does not wait for an answer.
        threading.Thread(target=self._run, name="inquiry", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answers.put(self._question())
        except SchedulerError as error:
            self._answers.put(error)

    def answer(self, timeout_s: float = 0.0) -> Found | SchedulerError | None:
        """What came back, once; None: nothing yet."""
        try:
            found = self._answers.get(timeout=timeout_s) if timeout_s else self._now()
        except Empty:
            return None
        self.open = False
        return found

    def _now(self) -> Found | SchedulerError:
        return self._answers.get_nowait()

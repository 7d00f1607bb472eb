"""Queries a scheduler in the background, because it may take minutes to answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from tfcluster.schedulers.base import SchedulerError

Found = TypeVar("Found")


class BackgroundQuery(Generic[Found]):
    """A query that runs in the background, repeatedly but only once at a time."""

    def __init__(self, question: Callable[[], Found]) -> None:
        self._question = question
        self._answers: SimpleQueue[Found | SchedulerError] = SimpleQueue()
        self.open = False
        """Whether a query has begun whose answer has not been taken yet."""

    def begin(self) -> None:
        self.open = True
        # A daemon thread: the exit does not wait for an answer.
        threading.Thread(target=self._run, name="inquiry", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answers.put(self._question())
        except SchedulerError as error:
            self._answers.put(error)

    def answer(self, timeout_s: float = 0.0) -> Found | SchedulerError | None:
        """Take the answer or error; None if there is no answer yet."""
        try:
            found = self._answers.get(timeout=timeout_s) if timeout_s else self._now()
        except Empty:
            return None
        self.open = False
        return found

    def _now(self) -> Found | SchedulerError:
        return self._answers.get_nowait()

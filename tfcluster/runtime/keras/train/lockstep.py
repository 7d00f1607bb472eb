"""Calls several functions in lockstep, each in its own thread, one at a time.

Each function runs until it needs what the others have computed. Then it waits, and the
next one runs. Once all functions wait, one thread acts on what they have computed, and
each function gets the result. The functions share the graph that is being traced. Their
threads take over the state that TensorFlow and Keras keep for each thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Unlike(Exception):
    """The functions wait for different things, or one ends while others wait."""


class _Cancelled(BaseException):
    """Ends a function that waits; a program's ``except Exception`` cannot catch it."""


@dataclass(slots=True)
class _Wait:
    """Describes what a function waits for."""

    kind: Hashable
    given: Any
    act: Callable[[list[Any]], Any]


class _Runner(Generic[T]):
    """One of the functions, and the thread that runs it."""

    def __init__(self, name: str, run: Callable[[], T]) -> None:
        self.wait: _Wait | None = None
        self.answer: Any = None
        self.result: list[T] = []
        self.error: BaseException | None = None
        self.cancelled = False
        self._go, self._paused = threading.Event(), threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, run), name=name, daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return bool(self.result) or self.error is not None

    def resume(self) -> None:
        """Let the function run until it waits or ends. Called by the main thread."""
        self.wait = None
        self._paused.clear()
        self._go.set()
        self._paused.wait()

    def pause(self, wait: _Wait) -> Any:
        """Wait for an answer. Called by the thread of the function."""
        self.wait = wait
        self._yield()
        return self.answer

    def end(self) -> None:
        """End the function if it waits."""
        if not self.is_over and self._thread.is_alive():
            self.cancelled = True
            self._go.set()
            self._thread.join()

    def _run(self, run: Callable[[], T]) -> None:
        try:
            self._await()
            self.result.append(run())
        except _Cancelled:
            pass
        except BaseException as error:  # The main thread raises it.
            self.error = error
        finally:
            self._paused.set()

    def _yield(self) -> None:
        self._paused.set()
        self._await()

    def _await(self) -> None:
        self._go.wait()
        self._go.clear()
        if self.cancelled:
            raise _Cancelled


class Lockstep:
    """Functions that run in lockstep, during one call of ``run``.

    ``inside()`` is entered in the thread of each function. The main thread calls
    ``enter`` and ``leave`` before and after each function's turn, with the function's
    number.
    """

    def __init__(
        self,
        inside: Callable[[], AbstractContextManager[object]],
        enter: Callable[[int], None],
        leave: Callable[[int], None],
    ) -> None:
        self._inside = inside
        self._enter, self._leave = enter, leave
        self._runners: list[_Runner[Any]] = []
        self._turn: int | None = None

    def run(
        self, names: Sequence[str], functions: Sequence[Callable[[], T]]
    ) -> list[T]:
        """Run the functions, return their results; ``names`` are their threads' names.

        Raises the first exception of a function, or ``Unlike``.
        """

        def within(function: Callable[[], T]) -> T:
            with self._inside():
                return function()

        with ExitStack() as ending:
            for name, function in zip(names, functions, strict=True):
                runner: _Runner[T] = _Runner(name, partial(within, function))
                self._runners.append(runner)
                ending.callback(runner.end)
            while True:
                for number, runner in enumerate(self._runners):
                    self._take_turn(number, runner)
                waits = [r.wait for r in self._runners if not r.is_over and r.wait]
                if not waits:
                    return [runner.result[0] for runner in self._runners]
                first, *others = waits
                if len(waits) < len(self._runners) or any(
                    other.kind != first.kind for other in others
                ):
                    raise Unlike
                answer = first.act([wait.given for wait in waits])
                for runner in self._runners:
                    runner.answer = answer

    def _take_turn(self, number: int, runner: _Runner[Any]) -> None:
        self._enter(number)
        self._turn = number
        try:
            runner.resume()
        finally:
            self._turn = None
        if runner.error is not None:
            raise runner.error
        self._leave(number)

    def together(self, kind: Hashable, given: Any, act: Callable[[list[Any]], T]) -> T:
        """Return ``act`` of the values that all functions have given, in their order.

        Each function calls this with an equal ``kind``. The main thread calls ``act``
        once.
        """
        assert self._turn is not None
        found: T = self._runners[self._turn].pause(_Wait(kind, given, act))
        return found

    def alone(self, kind: Hashable, act: Callable[[], T]) -> T:
        """Call the first function's ``act``; the others wait and get its result.

        Each function calls this with an equal ``kind``.
        """
        number = self._turn
        self.together((kind, "begins"), None, lambda _: None)
        own = act() if number == 0 else None
        found: T = self.together((kind, "has ended"), own, lambda given: given[0])
        return found

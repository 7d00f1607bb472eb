"""What the hooks of one training process share. Does not use Keras."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.collective.collectives import broadcast_bytes
from tfcluster.runtime.keras.types import Optimizer
from tfcluster.runtime.parameter_server.client import ParameterServerClient
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.telemetry.step_rate import ExchangeTotals, StepRate
from tfcluster.runtime.telemetry.tracer import CHECKPOINTS, span

if TYPE_CHECKING:  # It imports TensorFlow.
    from tfcluster.runtime.partition.divided_variables import DividedVariables


class OptimizerNames:
    """The names of optimizers, in the order in which the program uses them.

    The second ``adam`` is ``adam (2)``. A name is never given again, not even when its
    optimizer is gone: Python frees objects at different times on different ranks, and
    all ranks must use the same names.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: weakref.WeakKeyDictionary[Optimizer, str] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, optimizer: Optimizer) -> str:
        """The name of ``optimizer``; the first call determines it."""
        if optimizer not in self._names:
            name = optimizer.name
            self._counts[name] += 1
            count = self._counts[name]
            self._names[optimizer] = name if count == 1 else f"{name} ({count})"
        return self._names[optimizer]


@dataclass
class TrainingSession:
    """One process in training: whom it exchanges with, and what it is doing."""

    group: Group
    reporter: Reporter
    chief: bool
    """Whether this is rank 0 of all ranks."""
    divides: bool = True
    """True: the script's batches are those of all ranks. False: each rank has its own.
    """
    applies: int = 0
    """The number of training steps so far."""
    optimizer_names: OptimizerNames = field(default_factory=OptimizerNames)
    """The optimizers' names in messages and on ps tasks, equal on all ranks."""
    servers: ParameterServerClient | None = None
    """The connection to the ps tasks, if there is one."""
    tables: DividedVariables | None = None
    """The weights that are divided by rows, if any may be."""
    settle: Callable[[str], None] = lambda what: None
    """Makes the weights equal on all ranks before they are used."""

    def __post_init__(self) -> None:
        self._entered = 0
        self._warned: set[str] = set()
        # A handler of a signal may train or evaluate, too.
        self._lock = threading.RLock()
        self._local = threading.local()
        self.step_rate = StepRate(self.reporter, self, tracer=self.group.tracer)
        self.group.steps = lambda: self.step_rate.steps

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for other tasks since the start."""
        return self.group.waited_s + (self.servers.waited_s if self.servers else 0.0)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this task has exchanged with others since the start."""
        servers = self.servers.exchanged_bytes if self.servers else 0
        return self.group.exchanged_bytes + servers

    @property
    def totals(self) -> ExchangeTotals:
        """The cost of the exchanges between ranks so far, by purpose."""
        return self.group.totals

    @property
    def inside_keras(self) -> bool:
        """Whether Keras's own training, evaluation or prediction runs in any thread."""
        return self._entered > 0

    @contextmanager
    def entering(self) -> Iterator[None]:
        """A context in which Keras's own training, evaluation or prediction runs."""
        with self._lock:
            self._entered += 1
        try:
            yield
        finally:
            with self._lock:
                self._entered -= 1

    def within(self, what: str) -> bool:
        """Whether this thread is inside ``once(what)``."""
        return what in self._marks

    @contextmanager
    def once(self, what: str) -> Iterator[None]:
        """Mark this thread, so that a hook does not run again within itself."""
        marks = self._marks
        before = marks & {what}
        marks.add(what)
        try:
            yield
        finally:
            marks.discard(what)
            marks |= before

    @contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Mark this thread as in ``once("saving")``; record the time that it takes."""
        with (
            self.once("saving"),
            span(self.group.tracer, CHECKPOINTS, what.removeprefix("end of ")),
        ):
            yield

    @property
    def _marks(self) -> set[str]:
        """The marks of this thread."""
        if not hasattr(self._local, "marks"):
            self._local.marks = set()
        return self._local.marks

    def warn(self, text: str) -> None:
        """Warn the user on the console, once per text."""
        if text not in self._warned:
            self._warned.add(text)
            self.reporter.warning(text)
            if self.chief:
                sys.stderr.write(f"tfcluster: warning: {text}\n")

    def agreed(self, value: str, what: str) -> str:
        """Broadcast the chief's value to all ranks; ``what`` names the exchange.

        All ranks must call this. Raises what ``Group.exchange`` raises.
        """
        return broadcast_bytes(self.group, value.encode(), 0, Signature(what)).decode()

"""What the hooks of one training process know in common.

The hooks themselves stand in the other modules of this package; here is no Keras.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NoReturn, Protocol

from tfcluster.runtime.collective import CollectiveError, Group, Signature
from tfcluster.runtime.collective.buckets import DEFAULT_BYTES
from tfcluster.runtime.collective.collectives import broadcast_bytes
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.telemetry.step_rate import StepRate

_SUSPICIOUS_APPLIES = 3
"""A loop's first batch is never divided; more in a row mean that none will be."""

DOUBLING_RANK = 1
"""The one that has the chief's rows in a trial, each twice."""

MOST_TRIALS = 100
"""Batches without a gradient, after which there will be none: a trial costs time."""


@dataclass(frozen=True, slots=True)
class Share:
    """How this rank's part of a batch counts.

    Both may be tensors: a step that is traced once serves batches of many sizes.
    """

    rows: Any
    """Weight of this rank's gradients."""
    counts: Any
    """Whether metrics take this rank's rows into account."""
    total: Any = None
    """The weights of all ranks' parts together, where that is known beforehand."""
    alone: bool = False
    """The other ranks may not be in a step of theirs: nothing can be exchanged."""
    trial: Any = False
    """One rank has the chief's rows, each twice: see ``loss_scaling_probe``."""
    present: Any = None
    """How many rows there are, where they are not ``rows``."""
    data: Any = None
    """This rank's rows, where code of the program's own takes part in the loss."""
    undivided: Any = False
    """Whether every rank has all of the batch: a bool, or a boolean tensor."""


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch that a hand-written loop has got."""

    passage: int
    """Which pass over a dataset has yielded it."""
    fractions: tuple[Fraction, ...] | None
    """Each rank's part of it; None where every rank has got all of it."""


@dataclass(slots=True)
class LoopShare:
    """The share of hand-written loops, as the last batch of a dataset left it."""

    counts: bool
    rows: float = 1.0
    total: float = 1.0
    """Rows of the whole batch."""
    divided: bool = False
    trial: bool = False
    present: float | None = None
    """See ``Share``."""
    unjudged: set[str] = field(default_factory=set)
    """Optimizers that have applied gradients, none of which was in a trial."""
    trials: int = 0
    """Batches in trials so far."""
    batches: int = 0
    """How many have been yielded since a gradient was applied."""
    window: int = 1
    """How many there were before that one: some loops add up gradients by hand."""
    taken: list[TakenBatch] = field(default_factory=list)
    """The batches since a gradient was exchanged."""
    several: bool = False
    """The last gradient was of batches from several passes over datasets."""
    applies: int = 0
    """Gradients that such loops have exchanged so far."""
    undivided_applies: Counter[str] = field(default_factory=Counter)
    """How many of the last ones were the same on all ranks, by kind."""

    applied_at: str = "the program"
    """Where the program has applied the last gradient."""

    def present_rows(self) -> int | None:
        """The rows of the last batch that the program got, if it was divided."""
        if not self.divided:
            return None
        return int(self.rows if self.present is None else self.present)


class Trials(Protocol):
    """Looks for gradients that grow with the number of rows; called by all ranks."""

    judged: int
    """How many gradients have been judged so far."""

    def allowed(self) -> bool:
        """Whether one of the next batches may be that of a trial; the same on all."""
        ...

    def judge(self, optimizer: str, ours: Sequence[Array]) -> bool:
        """Look at this rank's gradients of a trial; whether they have said anything.

        Raises CollectiveError on all ranks where they are those of a sum.
        """
        ...


@dataclass
class Session:
    """One rank in training."""

    group: Group
    reporter: Reporter
    divides: bool = True
    """The user's batch is the global one; False where the program divides its data."""
    bucket_bytes: int = DEFAULT_BYTES
    """Gradients are exchanged in portions of about so many."""
    applies: int = 0
    """Gradients that have been exchanged so far."""
    hooked: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    """Variables, by id, whose gradients are seen to pass through our hook."""
    last_rows: float = 1.0
    """Weight of this rank's last gradient."""
    draws: int = 0
    """Random numbers that steps draw, others on each rank: how many in the program."""
    waited_for_servers_s: Callable[[], float] = lambda: 0.0
    """Seconds spent waiting for ps tasks since the start."""
    trials: Trials | None = None
    """Set where several ranks divide batches and average their gradients in step."""
    has_divided: bool = False
    """Whether a step of this call of ``fit`` has got a part of its batch."""
    settle: Callable[[str], None] = lambda what: None
    """What the strategy does before the weights are looked at; see ``Update``."""

    undivided = (
        "every rank computed the same gradient: the data is not divided. The result is "
        "right, but no faster than on one machine. Batches are divided in model.fit "
        "and in loops over a batched tf.data.Dataset: write the loop as `for x, y in "
        "tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH):`, outside of a "
        "tf.function"
    )

    def __post_init__(self) -> None:
        self._entered = 0
        self._warned: set[str] = set()
        self._judged: set[str] = set()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._share: ContextVar[Share | None] = ContextVar("share", default=None)
        self._plain_step: ContextVar[bool] = ContextVar("plain_step", default=False)
        self.pace = StepRate(self.reporter, self)
        self.group.steps = lambda: self.pace.steps
        # Without a divided batch every rank computes the same: one of them counts.
        self.loop = LoopShare(counts=not self.divides or self.chief)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def chief(self) -> bool:
        return self.group.rank == 0

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for others since the start."""
        return self.group.waited_s + self.waited_for_servers_s()

    @property
    def inside_keras(self) -> bool:
        """Keras's own training, evaluation or prediction is going on, in any thread."""
        return self._entered > 0

    @contextmanager
    def entering(self) -> Iterator[None]:
        with self._lock:
            self._entered += 1
        try:
            yield
        finally:
            with self._lock:
                self._entered -= 1

    @property
    def share(self) -> Share | None:
        """The share of the Keras step that is being traced or executed, if any."""
        return self._share.get()

    @contextmanager
    def stepping(self, share: Share, *, plain: bool = False) -> Iterator[None]:
        """``plain``: the step is Keras's own, and so is how its optimizer is called."""
        token = self._share.set(share)
        plain_token = self._plain_step.set(plain)
        try:
            yield
        finally:
            self._plain_step.reset(plain_token)
            self._share.reset(token)

    @property
    def plain_step(self) -> bool:
        """Whether gradients of this step reach the optimizer as the tape gives them."""
        return self._plain_step.get()

    def within(self, what: str) -> bool:
        """Whether this thread is inside ``once(what)``."""
        return bool(getattr(self._local, what, False))

    @contextmanager
    def once(self, what: str) -> Iterator[None]:
        """Mark this thread, so that a hook is not taken again within itself."""
        before = self.within(what)
        setattr(self._local, what, True)
        try:
            yield
        finally:
            setattr(self._local, what, before)

    def take(self, what: str) -> bool:
        """Whether this thread is inside ``once(what)``; not any more, then."""
        inside = self.within(what)
        setattr(self._local, what, False)
        return inside

    def applied(
        self,
        optimizer: str,
        *,
        in_loop: bool,
        judged: bool = False,
        exchanged: bool = True,
        step: str | None = None,
    ) -> None:
        """``optimizer`` gets a gradient; ``exchanged``: of all ranks' making.

        ``step`` is the same for all gradients that come once in a step.
        """
        self.applies += 1
        if exchanged:
            self.exchanged()
        step = optimizer if step is None else step
        self.pace.applied(step)
        if in_loop and self.divides:
            self._applied_in_loop(optimizer, judged, step)

    def hook(self, variables: Sequence[Any]) -> None:
        """Gradients for these variables pass through our hook."""
        for variable in variables:
            if id(variable) not in self.hooked:
                self.hooked[id(variable)] = weakref.ref(variable)

    def hooks(self, variables: Sequence[Any]) -> bool:
        """Whether gradients for any of these variables pass through our hook."""
        known = (self.hooked.get(id(variable)) for variable in variables)
        # The id may be that of another variable, which is gone.
        found = zip(variables, known, strict=True)
        return any(ref is not None and ref() is variable for variable, ref in found)

    def exchanged(self) -> None:
        """What is trained has gone to the other ranks, or has come from them."""
        self.reporter.exchanged()

    def _applied_in_loop(self, optimizer: str, judged: bool, step: str) -> None:
        loop = self.loop
        loop.applies += 1
        if loop.batches:
            loop.window, loop.batches = loop.batches, 0
        if loop.taken:
            loop.several = len({taken.passage for taken in loop.taken}) > 1
            loop.taken.clear()
        if judged:
            self._judged.add(optimizer)
            loop.unjudged.discard(optimizer)
        if loop.divided:
            loop.undivided_applies.clear()
            return
        if (
            self.trials is not None
            and optimizer not in self._judged
            and self.trials.allowed()
        ):
            loop.unjudged.add(optimizer)
        loop.undivided_applies[step] += 1
        if loop.undivided_applies[step] == _SUSPICIOUS_APPLIES:
            self.warn(f"{loop.applied_at}: {self.undivided}")

    def warn(self, text: str) -> None:
        """Tell the person at the console, once."""
        if text not in self._warned:
            self._warned.add(text)
            self.reporter.warning(text)
            if self.chief:
                sys.stderr.write(f"tfcluster: warning: {text}\n")

    def refuse(self, text: str) -> NoReturn:
        """Raise CollectiveError; called by all ranks at the same place.

        TensorFlow makes text of an error that is raised within an op. The group keeps
        the error, so that the program gets it as it was.
        """
        self.group.refusal = CollectiveError(text)
        raise self.group.refusal

    def agreed(self, value: str, what: str) -> str:
        """The chief's value, on all ranks."""
        return broadcast_bytes(self.group, value.encode(), 0, Signature(what)).decode()

"""The state that the hooks of one training process share.

The hooks themselves are in the other modules of this package. Does not use Keras.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NoReturn, Protocol

from tfcluster.runtime.collective import CollectiveError, Group, Signature
from tfcluster.runtime.collective.buckets import DEFAULT_BYTES
from tfcluster.runtime.collective.collectives import broadcast_bytes
from tfcluster.runtime.collective.exchange_totals import ExchangeTotals
from tfcluster.runtime.collective.gradient_mean import MeanOptions
from tfcluster.runtime.collective.rounding import Residuals, Rounding
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.keras.unique_names import OptimizerNames
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.telemetry.step_rate import StepRate
from tfcluster.runtime.telemetry.tracer import CHECKPOINTS, span
from tfcluster.runtime.tensor_types import Flag, Nest, Number, Weight

_SUSPICIOUS_APPLIES = 3
"""Warn after this many undivided batches in a row: a loop's first batch is never
divided."""

_SAME = (
    "every rank computed the same gradient: the data is not divided. The result is "
    "right, but no faster than on one machine. Batches are divided in model.fit and in "
)
_UNDIVIDED = (
    f"{_SAME}loops over a batched tf.data.Dataset: write the loop as `for x, y in "
    "tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH):`, outside of a "
    "tf.function, and not over as_numpy_iterator()"
)
_UNDIVIDED_SHARDS = (
    f"{_SAME}functions of loops: with runtime.shards, write the loop as `for x, y in "
    "tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH): step(x, y)`, with a "
    "tf.function `step` that computes the gradients"
)

TRIAL_RANK = 1
"""The rank that gets the chief's rows in a trial, each of them twice."""

BY_ROWS = "gradients by rows"
"""For ``Session.within``: the code is called for single rows."""

OF_ALL_ROWS = "code that got the rows of all ranks"
"""For ``Session.within``: a loss or a metric sees the whole batch."""

OF_A_CHECK = "a check of a shard"
"""For ``Session.within``: operations that one shard alone adds to the step."""

MOST_TRIALS = 100
"""Stop after this many trial batches, since each costs time."""


@dataclass(frozen=True, slots=True)
class Share:
    """The weight of this rank's part of a batch.

    All fields except ``data`` and ``alone`` may be scalar tensors: a step that is
    traced once serves batches of many sizes. ``rows``, ``total``, ``first`` and
    ``uncounted`` are numbers; ``counts``, ``trial`` and ``undivided`` are booleans.
    """

    rows: Weight
    """The weight of this rank's gradients."""
    counts: Flag
    """Whether metrics include this rank's rows."""
    total: Weight | None = None
    """The sum of all ranks' weights, if known in advance."""
    alone: bool = False
    """Whether the other ranks may not be running a step, so nothing may be exchanged.
    """
    trial: Flag = False
    """Whether one rank has each of the chief's rows twice; see ``loss_scaling_probe``.
    """
    uncounted: Weight = 0
    """The number of rows that this rank computes in addition to ``rows``, without
    weight."""
    first: Number = 0
    """The index, in the whole batch, of the first row that this rank computes."""
    data: Nest = None
    """This rank's rows, set if the program's own code takes part in the loss."""
    undivided: Flag = False
    """Whether every rank has the whole batch; a bool or a boolean tensor."""

    @property
    def present(self) -> Weight:
        """The number of rows that this rank computes: a number, or a scalar tensor."""
        return self.rows + self.uncounted

    @property
    def fraction(self) -> Weight | None:
        """This rank's fraction of all ranks' weights; None if ``total`` is unknown."""
        return None if self.total is None else self.rows / self.total

    @classmethod
    def undivided_batch(cls, *, counts: Flag, weight: float = 1.0) -> Share:
        """The share of a batch that every rank computes as a whole.

        ``weight`` is the weight of this rank's gradients, in a mean whose weights are
        not added up in advance.
        """
        return cls(rows=weight, counts=counts, total=1.0, undivided=True)


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch that a custom training loop has got."""

    dataset_pass: int
    """The pass over a dataset that yielded it."""
    fractions: tuple[Fraction, ...] | None
    """Each rank's fraction of it; None if every rank got the whole batch."""


@dataclass(slots=True)
class LoopState:
    """What is known about the program's custom training loops."""

    share: Share
    """This rank's share of the last batch that a dataset yielded; without tensors."""
    whole_rows: int = 0
    """The number of rows of the last batch that a dataset yielded, over all ranks."""
    in_pass: bool = False
    """Whether ``share`` belongs to a batch of a pass that has not ended."""
    unjudged: set[str] = field(default_factory=set)
    """Optimizers that have applied gradients but have not been judged by a trial
    yet."""
    trials: int = 0
    """The number of trial batches so far."""
    batches: int = 0
    """The number of batches since the last gradient was applied."""
    window: int = 1
    """The number of batches in the last gradient: some loops accumulate gradients."""
    taken: list[TakenBatch] = field(default_factory=list)
    """The batches since a gradient was exchanged."""
    several: bool = False
    """Whether the last gradient came from batches of several passes over datasets."""
    applies: int = 0
    """The number of gradients that custom loops have exchanged so far."""
    undivided_applies: Counter[str] = field(default_factory=Counter)
    """The number of consecutive gradients that were equal on all ranks, by ``step``."""

    applied_at: str = "the program"
    """Where the program applied the last gradient."""

    @property
    def divided(self) -> bool:
        """Whether each rank got its own part of the last batch."""
        return not self.share.undivided

    @property
    def is_dividing(self) -> bool:
        """Whether the program is computing its own part of a batch."""
        return self.divided and self.in_pass

    def abandon_step(self) -> None:
        """Forget the batches of a step that has failed: the program may continue."""
        self.taken.clear()
        self.batches = 0
        self.share = replace(self.share, trial=False)

    def present_rows(self) -> int | None:
        """The rows of the last batch that the program got; None if it was undivided."""
        return int(self.share.present) if self.divided else None


class Trials(Protocol):
    """Detects gradients that grow with the number of rows; called by all ranks."""

    judged: int
    """The number of gradients judged so far."""

    def allowed(self) -> bool:
        """Whether one of the next batches may be a trial; the same on all ranks.

        Raises what ``Group.exchange`` raises.
        """
        ...

    def judge(self, optimizer: str, ours: Sequence[Array]) -> bool:
        """Judge this rank's gradients of a trial; return whether they were conclusive.

        ``ours`` has a float array for each variable, of equal shapes on all ranks.
        Raises CollectiveError on all ranks if the gradients belong to a sum over the
        rows, and what ``Group.exchange`` raises.
        """
        ...

    def judge_repeated(
        self, optimizer: str, repeated: Sequence[Array], once: Sequence[Array]
    ) -> bool:
        """Like ``judge``, for this rank's gradients for some rows, each given twice.

        ``once`` has the gradients for the same rows given once.
        """
        ...


@dataclass
class Session:
    """The state of one rank in training."""

    group: Group
    reporter: Reporter
    divides: bool = True
    """True: tfcluster divides the global batch. False: the program divides its data."""
    waits_in_steps: bool = True
    """Whether ranks wait for each other in every step; not under ``local_sgd``."""
    refuses_differences: bool = True
    """Whether ``differs`` ends the program."""
    normalizes_whole_batches: bool = False
    """Whether BatchNormalization normalises over the rows of all ranks by default."""
    shards: int | None = None
    """The number of parts of every batch; None means one for each rank. See
    ``strategies.shards``."""
    bucket_bytes: int = DEFAULT_BYTES
    """The approximate number of bytes per bucket in which gradients are exchanged."""
    rounding: Rounding | None = None
    """How the transport rounds gradients between hosts."""
    feeds_errors_back: bool = False
    """Whether each rank adds the last step's rounding error to its gradients."""
    applies: int = 0
    """The number of gradients exchanged so far."""
    exchanges: int = 0
    """The number of gradient exchanges that were traced or ran eagerly."""
    optimizer_names: OptimizerNames = field(default_factory=OptimizerNames)
    """The optimizers' names in messages and on ps tasks, equal on all ranks."""
    hooked: dict[int, weakref.ref[Variable]] = field(default_factory=dict)
    """Variables, by id, whose gradients pass through our hook."""
    last_rows: float = 1.0
    """The weight of this rank's last gradient."""
    draws: int = 0
    """The number of calls so far that drew different random numbers on each rank."""
    unapplied: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of weights, by id, whose gradients were computed but not applied."""
    waited_for_servers_s: Callable[[], float] = lambda: 0.0
    """Seconds spent waiting for ps tasks since the start."""
    bytes_with_servers: Callable[[], int] = lambda: 0
    """Bytes of arrays exchanged with ps tasks since the start."""
    retraced_step: Hashable = None
    """The step of ``fit`` that is running, if it is traced once more for trials."""
    trials: Trials | None = None
    """Set if several ranks divide batches and average their gradients synchronously."""
    has_divided: bool = False
    """Whether a step of this call of ``fit`` got only a part of its batch."""
    graph_loop_share: Callable[[], Share] | None = None
    """Returns ``loop.share`` for graphs: scalars that are read when the graph runs."""
    settle: Callable[[str], None] = lambda what: None
    """The strategy's ``settle``: makes the weights equal before they are used."""

    @property
    def undivided(self) -> str:
        """The warning that a loop is not divided."""
        return _UNDIVIDED_SHARDS if self.shards else _UNDIVIDED

    def __post_init__(self) -> None:
        self._entered = 0
        self._warned: set[str] = set()
        self._judged: set[str] = set()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._residuals: dict[Hashable, Residuals] = {}
        self._share: ContextVar[Share | None] = ContextVar("share", default=None)
        self._plain_step: ContextVar[bool] = ContextVar("plain_step", default=False)
        self._shard: ContextVar[int | None] = ContextVar("shard", default=None)
        self.step_rate = StepRate(self.reporter, self, tracer=self.group.tracer)
        self.group.steps = lambda: self.step_rate.steps
        # With an undivided batch, every rank computes the same gradients, so only the
        # chief's count.
        counts = not self.divides or self.chief
        self.loop = LoopState(Share.undivided_batch(counts=counts))

    @property
    def rank(self) -> int:
        """This rank's number among ``size``; asynchronous ranks are 0 of 1."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks that train synchronously."""
        return self.group.size

    @property
    def chief(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.group.rank == 0

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for other tasks since the start."""
        return self.group.waited_s + self.waited_for_servers_s()

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this task has exchanged with others since the start."""
        return self.group.exchanged_bytes + self.bytes_with_servers()

    @property
    def totals(self) -> ExchangeTotals:
        """The cost of the exchanges between ranks so far, by purpose."""
        return self.group.totals

    def mean_options(self, what: Hashable) -> MeanOptions:
        """How gradients are averaged; ``what`` identifies them in every trace."""
        residuals = None
        if self.feeds_errors_back and self.rounding is not None:
            residuals = self._residuals.setdefault(what, Residuals())
        return MeanOptions(self.bucket_bytes, self.rounding, residuals)

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

    @property
    def share(self) -> Share | None:
        """The share of the Keras step that is being traced or run, if any."""
        return self._share.get()

    @property
    def current_shard(self) -> int | None:
        """The shard that the current step computes; None without shards."""
        return self._shard.get()

    @property
    def part(self) -> int:
        """The number of the current part of a batch: the shard's or the rank's."""
        shard = self.current_shard
        return self.rank if shard is None else shard

    @contextmanager
    def stepping(
        self, share: Share, *, plain: bool = False, shard: int | None = None
    ) -> Iterator[None]:
        """Set the share of a step. ``plain``: Keras's own step calls the optimizer.

        With ``shard``, the step computes only this one of the rank's shards.
        """
        token = self._share.set(share)
        plain_token = self._plain_step.set(plain)
        shard_token = self._shard.set(shard)
        try:
            yield
        finally:
            self._shard.reset(shard_token)
            self._plain_step.reset(plain_token)
            self._share.reset(token)

    def refuse_in_shard(self, what: str) -> None:
        """Raise CollectiveError if the step that is running computes only one shard.

        ``what`` would need the other shards' rows, and begins the sentence.
        """
        if self.current_shard is not None:
            self.refuse(
                f"{what} all rows of the batch while it computes its gradients. With "
                "runtime.shards, a step computes one shard after the other and cannot "
                "see the others' rows. Run the job without runtime.shards"
            )

    @property
    def plain_step(self) -> bool:
        """Whether the optimizer gets this step's gradients as the tape returns them."""
        return self._plain_step.get()

    def within(self, what: str) -> bool:
        """Whether this thread is inside ``once(what)``."""
        return bool(getattr(self._local, what, False))

    @contextmanager
    def once(self, what: str) -> Iterator[None]:
        """Mark this thread, so that a hook does not run again within itself."""
        before = self.within(what)
        setattr(self._local, what, True)
        try:
            yield
        finally:
            setattr(self._local, what, before)

    @contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Mark this thread as in ``once("saving")``; record the time that it takes."""
        with (
            self.once("saving"),
            span(self.group.tracer, CHECKPOINTS, what.removeprefix("end of ")),
        ):
            yield

    def marks(self) -> dict[str, bool]:
        """The marks of this thread, for ``set_marks`` in another thread."""
        return dict(vars(self._local))

    def set_marks(self, marks: Mapping[str, bool]) -> None:
        """Mark this thread like another thread."""
        vars(self._local).update(marks)

    def take(self, what: str) -> bool:
        """Whether this thread is inside ``once(what)``. Removes the mark."""
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
        """Record that ``optimizer`` gets a gradient.

        ``exchanged`` says that the gradient is combined from all ranks. ``step``
        defaults to ``optimizer``; gradients that occur exactly once per step share one
        name.
        """
        self.applies += 1
        if exchanged:
            self.exchanged()
        step = optimizer if step is None else step
        self.step_rate.applied(step)
        if in_loop and self.divides:
            self._applied_in_loop(optimizer, judged, step)

    def hook(self, variables: Sequence[Variable]) -> None:
        """Record that gradients for these variables pass through our hook."""
        for variable in variables:
            if id(variable) not in self.hooked:
                self.hooked[id(variable)] = weakref.ref(variable)

    def hooks(self, variables: Sequence[Variable]) -> bool:
        """Whether gradients for any of these variables pass through our hook."""
        known = (self.hooked.get(id(variable)) for variable in variables)
        # The id may now belong to another variable, if the first one is gone.
        found = zip(variables, known, strict=True)
        return any(ref is not None and ref() is variable for variable, ref in found)

    def exchanged(self) -> None:
        """Report that weights or gradients have been exchanged with the other ranks."""
        self.reporter.exchanged()

    def _applied_in_loop(self, optimizer: str, judged: bool, step: str) -> None:
        loop = self.loop
        loop.applies += 1
        # After a pass has ended, its batches may still belong to an accumulated
        # gradient. Otherwise the gradient has another source, such as a loop inside a
        # tf.function.
        divided = loop.divided and (loop.in_pass or bool(loop.batches or loop.taken))
        if loop.batches:
            loop.window, loop.batches = loop.batches, 0
        if loop.taken:
            loop.several = len({taken.dataset_pass for taken in loop.taken}) > 1
            loop.taken.clear()
        if judged:
            self._judged.add(optimizer)
            loop.unjudged.discard(optimizer)
        if divided:
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
        """Warn the user on the console, once per text."""
        if text not in self._warned:
            self._warned.add(text)
            self.reporter.warning(text)
            if self.chief:
                sys.stderr.write(f"tfcluster: warning: {text}\n")

    def note(self, text: str) -> None:
        """Inform the user on the console about something that affects no result."""
        self.reporter.note(text)
        if self.chief:
            sys.stderr.write(f"tfcluster: note: {text}\n")

    def differs(self, text: str) -> None:
        """Report that the result would differ from that of one machine.

        The next exchange raises an error on all ranks, even if only this rank has found
        the difference. If the configuration says so, or if the strategy is meant to
        compute something else (``local_sgd``), there is one warning per text instead.
        """
        if not self.refuses_differences:
            self.warn(text)
        elif not self.group.objection:
            self.group.objection = (
                f"{text}. To train nevertheless, set runtime.on_difference to warn "
                "(tfcluster launch --set runtime.on_difference=warn)"
            )

    def refuse(self, text: str) -> NoReturn:
        """Raise CollectiveError. All ranks must call this at the same point."""
        self.loop.abandon_step()
        error = CollectiveError(text)
        self.group.objection = ""
        self.group.keep(error)
        raise error

    def agreed(self, value: str, what: str) -> str:
        """Broadcast the chief's value to all ranks; ``what`` names the exchange.

        All ranks must call this. Raises what ``Group.exchange`` raises.
        """
        return broadcast_bytes(self.group, value.encode(), 0, Signature(what)).decode()

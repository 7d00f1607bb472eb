"""Local SGD: ranks train independently, and their parameters are averaged periodically.

A rank applies the gradients of its own rows to its own weights. Every few steps, and
before weights are saved or evaluated, all ranks take the mean, weighted by the number
of rows on which each has trained since the last averaging: Stich, arXiv:1805.09767,
with the weights of federated averaging, McMahan et al., arXiv:1602.05629. The
optimizers' slot variables are not averaged: moments estimate the same gradient on every
rank, and sending them would double or triple the number of bytes.

Functions that train compute the rank's rows: see ``partition.own_rows``. All other
functions are divided among the ranks, after an averaging.
"""

from __future__ import annotations

import gc
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.collectives import allgather_bytes, reduce_arrays
from tfcluster.runtime.collective.packing import reduced
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.strategies.local_sgd_schedule import Drift, Schedule
from tfcluster.runtime.keras.strategies.partitioned import variable_paths, watched
from tfcluster.runtime.keras.tf_variables import new_variable, raw
from tfcluster.runtime.keras.train.eager_gradients import OptimizerSteps
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import KerasVariable, Optimizer
from tfcluster.runtime.partition.agreement import Agreement
from tfcluster.runtime.partition.exchange import HostExchanger
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.host_rows import gathered, rows_of
from tfcluster.runtime.partition.own_rows import changes
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    Partial,
    Placement,
    Ranks,
    Shard,
)
from tfcluster.runtime.partition.programs import RankProgram
from tfcluster.runtime.partition.variables import Watched
from tfcluster.runtime.partition.whole_work import WholeWork
from tfcluster.runtime.tensor_types import Gradient, Nest, Tensor
from tfcluster.runtime.tensors import name_of

_STATISTICS = struct.Struct(">dQ")
"""A replica's squared relative distance from the mean, and its proposed interval."""

_EAGER = (
    "a training step runs eagerly, so every rank computes whole batches: the result is "
    "right, but no faster than on one machine. Put the step in a tf.function"
)


@dataclass(slots=True, eq=False)
class LocalTraining:
    """What one optimizer trains."""

    optimizer: weakref.ref[Optimizer]
    counter: Any
    """A ``tf.Variable`` that counts the optimizer's steps, on all ranks alike."""
    variables: list[weakref.ref[KerasVariable]] = field(default_factory=list)
    averaged: int = 0
    """The count at the last averaging."""

    def steps(self) -> int:
        """The number of steps since the last averaging."""
        return int(self.counter.numpy()) - self.averaged


@dataclass(frozen=True, slots=True)
class Changed:
    """A ``tf.Variable`` that a program changes, and what it assigns."""

    variable: weakref.ref[Any]
    kind: Placement


class LocalSgd:
    """Averages after ``every`` steps, or about every ``seconds``: see ``Schedule``."""

    def __init__(
        self,
        session: TrainingSession,
        *,
        every: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._agreement = Agreement(session.group, session.warn)
        self._schedule = Schedule(every=every, seconds=seconds)
        self._drift = Drift()
        self._optimizer_steps = OptimizerSteps(session)
        self._clock = clock
        self._since_s = clock()
        """When the last averaging ended."""
        self._rows = 0.0
        """The rows on which this rank has trained since the last averaging."""
        self._trainings: list[LocalTraining] = []
        self._runs = 0
        """How many programs that train have run since the last averaging."""
        self._by_optimizer: dict[int, LocalTraining] = {}
        """By ``id``. They outlive optimizers, since graphs may know their counters."""
        self._changes: dict[RankProgram, list[Changed]] = {}
        """The variables that each program changes."""
        self._changed: dict[int, tuple[Any, Placement]] = {}
        """The ``tf.Variable`` objects that have changed since the last averaging, by
        ``id``. Their order is the same on all ranks."""

    def install(self, *, seed: int, strict: bool) -> None:
        """Install the hooks, once per process; for the arguments see ``partitioned``.

        If the program divides its data itself, functions compute all rows that they
        get.
        """
        session = self._session
        group = session.group
        if session.divides:
            ranks = Ranks(session.group.size, (session.group.rank,))
        else:
            ranks = Ranks(1, (0,))
        self._split = ranks.splits[0]
        whole_work = WholeWork(session.warn)

        def ran(program: RankProgram) -> None:
            whole_work.ran(program)
            if program.trains:
                self._optimizer_steps.count(program.label)

        hook = Hook(
            ranks,
            lambda label: HostExchanger(group, label),
            seed=seed,
            strict=strict,
            agree=self._agree if session.divides else None,
            is_paused=lambda: session.within("saving"),
            ran=ran,
            alone=self,
            variable_names=variable_paths,
        )
        tf_patches.TABLE.install(
            {
                tf_patches.CALL_FUNCTION: hook.call,
                tf_patches.FLAT_CALL: hook.flat_call,
                tf_patches.ITERATOR_NEXT: self._next,
            }
        )
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.LOSS_SCALE_APPLY: self._apply,
            }
        )
        session.settle = self.settle

    # --- what trains ------------------------------------------------------------------

    def begins(
        self,
        program: RankProgram,
        inputs: Callable[[], Sequence[Watched]],
        variables: Callable[[], Sequence[Any]],
    ) -> None:
        """See ``Alone``: note what the program changes; begin with equal variables."""
        changed = self._changes.get(program)
        if changed is None:
            watched = inputs()
            self._agreement.on_first_values(program.label, watched)
            assert program.placed is not None
            kinds = changes(program.placed)
            # Variables that nothing refers to any more must be gone on all ranks.
            gc.collect()
            own = {id(getattr(one, "handle", None)): one for one in variables()}
            changed = [
                Changed(weakref.ref(own[id(variable.handle)]), kinds[variable.place])
                for variable in watched
                if variable.place in kinds
                and variable.dtype.is_floating
                and id(variable.handle) in own
            ]
            self._changes[program] = changed
        for change in changed:
            self._note(change.variable(), change.kind)
        placed = program.placed
        assert placed is not None
        rows = placed.rows
        if rows is not None and program.is_divided:
            rows = self._split.count(rows)
        self._rows += rows or 1
        self._runs += program.trains

    def ended(self) -> None:
        """See ``Alone``: average if an averaging is due."""
        # A program may change its weights without an optimizer.
        steps = self._steps() or self._runs
        if steps and self._schedule.is_due(steps):
            self._average(steps)

    def _note(self, variable: Any, kind: Placement = REPLICATE) -> None:
        if variable is not None:
            self._changed.setdefault(id(variable), (variable, kind))

    def _steps(self) -> int:
        """The largest number of steps of an optimizer since the last averaging."""
        return max((training.steps() for training in self._trainings), default=0)

    def _apply(
        self,
        original: Callable[..., KerasVariable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> KerasVariable:
        """Count a step; one of a LossScaleOptimizer counts even if it is skipped."""
        if self._session.within("apply"):
            return original(optimizer, grads, trainable_variables)
        self._optimizer_steps.watch(getattr(optimizer, "inner_optimizer", optimizer))
        with self._session.once("apply"):
            result = original(optimizer, grads, trainable_variables)
        self._count(optimizer, trainable_variables)
        if tf.executing_eagerly():
            self._optimizer_steps.count()
        return result

    @unconverted
    def _count(
        self, optimizer: Optimizer, variables: Sequence[KerasVariable] | None
    ) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        trained = list(variables or internals.trained_variables(inner))
        training = self._by_optimizer.get(id(optimizer))
        if training is None or training.optimizer() is not optimizer:
            training = LocalTraining(weakref.ref(optimizer), new_variable(np.int64(0)))
            self._by_optimizer[id(optimizer)] = training
            self._trainings.append(training)
        registered = {id(ref()) for ref in training.variables}
        training.variables.extend(
            weakref.ref(variable)
            for variable in trained
            if id(variable) not in registered
        )
        training.counter.assign_add(1)
        if tf.executing_eagerly():
            if not self._rows:
                self._session.warn(_EAGER)
                label = f"first values of {optimizer.name}"
                self._agreement.on_first_values(label, watched(trained))
            self.ended()

    def _next(
        self, original: Callable[[Iterator[Nest]], Nest], iterator: Iterator[Nest]
    ) -> Nest:
        """Average when a loop of the program has got all batches."""
        try:
            return original(iterator)
        except StopIteration:
            if tf.executing_eagerly() and not self._session.inside_keras:
                self.settle("end of a pass over a dataset")
            raise

    # --- averaging --------------------------------------------------------------------

    def settle(self, what: str) -> None:
        """Average everything that has been trained since the last averaging."""
        if tf.inside_function() or self._session.within("averaging"):
            return
        steps = self._steps()
        if steps or self._changed:
            self._average(steps)

    @property
    def steps(self) -> int:
        """The number of training steps so far."""
        self._optimizer_steps.count()
        return self._session.applies

    def settle_weights(self, variables: Sequence[KerasVariable]) -> None:
        """Average these variables and all that has been trained.

        Keras may have set them on each rank, to the optimizer's moving averages.
        """
        for variable in variables:
            self._note(raw(variable))
        self.settle("end of fit")

    def merge(self, variables: Sequence[KerasVariable]) -> None:
        """Average the variables of metrics that have changed; see ``settle``."""
        if tf.inside_function():
            return
        popped = [self._changed.pop(id(raw(one)), None) for one in variables]
        chosen = [change for change in popped if change is not None]
        if chosen:
            self._combine("metrics", chosen)

    def _agree(
        self,
        program: str,
        inputs: Sequence[Tensor],
        variables: Sequence[Watched],
        exchanges: Sequence[str],
    ) -> list[Tensor]:
        """Before ranks compute a batch together, their variables must be equal."""
        self.settle(program)
        return self._agreement.on(program, inputs, variables, exchanges)

    def _average(self, steps: int) -> None:
        for training in self._trainings:
            if training.steps():
                for ref in training.variables:
                    variable = ref()
                    if variable is not None and tf.as_dtype(variable.dtype).is_floating:
                        self._note(raw(variable))
        trained = {
            id(raw(variable))
            for training in self._trainings
            for variable in (ref() for ref in training.variables)
            if variable is not None
        }
        own = self._of_optimizers()
        chosen = [change for key, change in self._changed.items() if key not in own]
        before, after = self._combine("parameters", chosen)
        moved = [i for i, (one, _) in enumerate(chosen) if id(one) in trained]
        self._agree_on_interval(
            steps, [before[i] for i in moved], [after[i] for i in moved]
        )
        for training in self._trainings:
            training.averaged += training.steps()
        # Forget optimizers that are gone.
        self._trainings = [
            one for one in self._trainings if one.optimizer() is not None
        ]
        self._changed.clear()
        self._rows, self._runs, self._since_s = 0.0, 0, self._clock()
        self._session.reporter.exchanged()

    def _of_optimizers(self) -> set[int]:
        """The variables of the optimizers, which stay local."""
        handles: set[int] = set()
        for training in self._trainings:
            optimizer = training.optimizer()
            for owner in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                if owner is not None:
                    handles.update(id(raw(variable)) for variable in owner.variables)
        return handles

    def _combine(
        self, what: str, chosen: Sequence[tuple[Any, Placement]]
    ) -> tuple[list[Array], list[Array]]:
        """Make variables equal on all ranks; returns the values before and after."""
        before = [np.asarray(variable.numpy()) for variable, _ in chosen]
        kinds = [kind for _, kind in chosen]
        words = tuple(
            tensor_words(f"{name_of(variable)} {kind}", value.dtype.name, value.shape)
            for (variable, kind), value in zip(chosen, before, strict=True)
        )
        signature = Signature(f"mean of {what}", words)
        averaged = [i for i, kind in enumerate(kinds) if not _is_of_rows(kind)]
        rows = struct.pack("<d", self._rows or 1.0)
        with self._session.group.exchange(signature, rows) as call:
            total = sum(struct.unpack("<d", note)[0] for note in call.notes)
            share = (self._rows or 1.0) / total
            terms = [
                before[i].astype(np.result_type(before[i], np.float32)) * share
                for i in averaged
            ]
            means = reduced(call, terms, ReduceOp.SUM)
        after = list(before)
        for index, mean in zip(averaged, means, strict=True):
            dtype = before[index].dtype
            exact = mean if tf.as_dtype(dtype).is_floating else np.rint(mean)
            after[index] = exact.astype(dtype)
        for index, kind in enumerate(kinds):
            if _is_of_rows(kind):
                after[index] = self._of_rows(what, before[index], kind)
        for (variable, _), value in zip(chosen, after, strict=True):
            variable.assign(value)
        return before, after

    def _of_rows(self, what: str, value: Array, kind: Partial | Shard) -> Array:
        """The largest or smallest value, or the rows of all ranks."""
        group, signature = self._session.group, Signature(f"rows of {what}")
        if isinstance(kind, Partial):
            op = ReduceOp.MAX if kind.op == "max" else ReduceOp.MIN
            return reduce_arrays(group, [value], op, signature)[0]
        if self._split.size == 1:
            return value  # Ranks have other data.
        with group.exchange(signature) as call:
            part = rows_of(value, kind, self._split)
            return gathered(call.transport, part, kind)

    def _agree_on_interval(
        self, steps: int, before: Sequence[Array], after: Sequence[Array]
    ) -> None:
        proposal = self._schedule.proposal(steps, self._clock() - self._since_s)
        ours = _STATISTICS.pack(_squared_distance(before, after), proposal)
        group = self._session.group
        sent = allgather_bytes(group, ours, Signature("distance from the mean"))
        statistics = [_STATISTICS.unpack(data) for data in sent]
        self._schedule.agreed(statistics[0][1])
        distance = float(np.sqrt(np.mean([row[0] for row in statistics])))
        if steps and (warning := self._drift.saw(distance, steps)):
            self._session.warn(warning)


def _is_of_rows(kind: Placement) -> TypeGuard[Partial | Shard]:
    return isinstance(kind, Shard) or kind in (Partial("max"), Partial("min"))


def _squared_distance(arrays: Sequence[Array], means: Sequence[Array]) -> float:
    """Squared distance of this rank's arrays from the means, relative to the means."""
    away = length = 0.0
    for array, mean in zip(arrays, means, strict=True):
        middle = np.asarray(mean).reshape(-1).astype(np.float32, copy=False)
        apart = np.asarray(array).reshape(-1).astype(np.float32) - middle
        away += float(np.dot(apart, apart))
        length += float(np.dot(middle, middle))
    return away / length if length else 0.0

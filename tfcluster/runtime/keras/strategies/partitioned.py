"""Ranks that divide every traced function: see ``tfcluster.runtime.partition``.

Numbers need no hook in Keras. What remains is what other ranks must not do again:
printing progress and writing files; and what nobody traces: eager gradients, and the
end of training.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from functools import partial

import keras
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective.transports.tensorflow.transport import (
    TensorFlowTransport,
)
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.strategies import shards
from tfcluster.runtime.keras.strategies.unsupported_strategies import refuse_strategies
from tfcluster.runtime.keras.tf_variables import held
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.eager_gradients import EagerGradients, OptimizerSteps
from tfcluster.runtime.keras.train.partitioned_models import PartitionedModels
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Model
from tfcluster.runtime.partition.agreement import Agreement, joined
from tfcluster.runtime.partition.exchange import Exchanger, HostExchanger
from tfcluster.runtime.partition.explain import mostly_whole
from tfcluster.runtime.partition.failures import Failures
from tfcluster.runtime.partition.hook import Hook, Running
from tfcluster.runtime.partition.op_runs import OpRuns
from tfcluster.runtime.partition.ordered_exchange import OrderedExchanger
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.programs import Program
from tfcluster.runtime.partition.variables import Watched
from tfcluster.runtime.scripts import program_kind


def install(session: Session, *, seed: int, strict: bool) -> None:
    """Install the hooks, once per process; ``seed`` is equal on all ranks.

    Batches are divided among the ranks, or into ``session.shards``, if there are any.
    ``strict`` raises what the division of a function raises, which is otherwise
    computed whole.
    """
    group = session.group
    agreement = Agreement(group, session.warn)
    group.last_state = agreement.variables.last_state
    group.last_equal = agreement.variables.last_equal
    count = session.shards
    whole_work = WholeWork(session.warn)
    steps = OptimizerSteps(session)
    gradients = EagerGradients(session, agreement, steps)
    if count is None:
        ranks = Ranks(session.size, (session.rank,))
    else:
        shards.compute_alike(count, session.size)
        ranks = shards.ranks_of(count, session.rank, session.size)

    def ran(program: Program) -> None:
        whole_work.ran(program)
        if count is not None:
            shards.require_alike()
        if program.is_divided:
            session.exchanged()
            gradients.of_tape |= program.is_of_tape
            if program.trains:
                gradients.divided += 1
                steps.count(program.label)

    def is_paused() -> bool:
        return (
            session.within("saving")
            or program_kind.distributes_itself()
            # Each rank predicts for the rows that its program has.
            or (not session.divides and session.within("predicting"))
        )

    new_exchanger: Callable[[str], Exchanger] = partial(
        HostExchanger,
        group,
        bucket_bytes=session.bucket_bytes,
        rounding=session.rounding,
        feeds_back=session.feeds_errors_back,
    )
    if count is not None:
        new_exchanger = partial(OrderedExchanger, group, ranks=count)
    running: Running = Failures(group).running
    if isinstance(group.transport, TensorFlowTransport):
        runs = OpRuns(group, group.transport, new_exchanger)
        new_exchanger, running = runs.exchanger, runs.running
    if ranks.size > 1:
        hook = Hook(
            ranks,
            new_exchanger,
            seed=seed,
            strict=strict,
            agree=agreement.on,
            join=None if session.divides else partial(joined, group),
            is_paused=is_paused,
            ran=ran,
            running=running,
            variable_names=variable_paths,
        )
        tf_patches.TABLE.install(
            {tf_patches.CALL_FUNCTION: hook.call, tf_patches.FLAT_CALL: hook.flat_call}
        )
    else:
        tf_patches.TABLE.install({tf_patches.CALL_FUNCTION: steps.after_call})
    tf_patches.TABLE.install({tf_patches.TAPE_GRADIENT: reduced.gradients})
    eager = {
        patches.OPTIMIZER_APPLY: gradients.apply,
        patches.LOSS_SCALE_APPLY: gradients.apply,
    }
    patches.TABLE.install(eager)
    saving = ChiefOnlySaving(session)
    saving.install()

    def begin(model: Model) -> None:
        agreement.variables.renew()
        variables = variables_of(model)
        if variables:
            agreement.on("variables at the beginning of fit", (), variables)

    PartitionedModels(session, saving, begin).install()
    refuse_strategies()
    atexit.register(_end, session)


def _end(session: Session) -> None:
    """Report at the end of a program that nothing of it was divided: it is right, too.

    That cannot be said of ranks with batches of their own, and of programs that
    distribute themselves.
    """
    report = session.reporter
    ended_early = getattr(sys, "last_value", None) is not None
    itself = program_kind.distributes_itself()
    if report.has_exchanged or ended_early or itself or not session.divides:
        return
    session.warn(
        "nothing of this program was divided: every rank computed all of it. The "
        "result is right, but no faster than on one machine. Put a step of the "
        "training into a function with @tf.function that gets a batch"
    )
    report.exchanged()


def variable_paths() -> dict[int, str]:
    """The paths of all of Keras's variables, by the ``id`` of their handles."""
    # Not isinstance: it may call code of objects that stand for others.
    found = [
        each for each in gc.get_objects() if issubclass(type(each), keras.Variable)
    ]
    return {
        id(own.handle): each.path
        for each in found
        if isinstance(each.value, tf.Variable)
        for own in held(each.value)
    }


def variables_of(model: Model) -> list[Watched]:
    """The variables of a model and its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *([] if optimizer is None else optimizer.variables)]
    return [
        Watched(each.path, own.handle, each.value.dtype, 0, tuple(each.shape))
        for each in found
        if isinstance(each.value, tf.Variable) and each.value.dtype != tf.string
        for own in held(each.value)
    ]


class WholeWork:
    """Warns once of each function whose work is mostly computed by every rank."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._undivided: set[str] = set()
        self._judged: set[str] = set()

    def ran(self, program: Program) -> None:
        """Called after each program."""
        if program.label in self._judged:
            return
        # The first batch that a loop takes is computed whole, and tells its size.
        if not program.is_divided and program.function not in self._undivided:
            self._undivided.add(program.function)
            return
        self._judged.add(program.label)
        sentence = mostly_whole([program])
        if sentence is not None:
            self._warn(sentence)

"""Ranks that divide every traced function: see ``tfcluster.runtime.partition``.

Numbers need no hook in Keras. What remains is what other ranks must not do again:
printing progress and writing files; and what nobody traces: eager gradients, and the
end of training.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.collective.transports.tensorflow.transport import (
    TensorFlowTransport,
)
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.strategies import shards
from tfcluster.runtime.keras.strategies.unsupported_strategies import refuse_strategies
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.fit_position import FitPosition
from tfcluster.runtime.keras.train.injected_callbacks import (
    changed_callbacks,
    for_evaluation,
    looks_at_batches,
    with_chief_only_files,
)
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Callback, Logs, Model, Optimizer
from tfcluster.runtime.partition.agreement import Agreement, joined
from tfcluster.runtime.partition.exchange import Exchanger, HostExchanger
from tfcluster.runtime.partition.explain import mostly_whole
from tfcluster.runtime.partition.hook import Hook, Running, at_once
from tfcluster.runtime.partition.op_runs import OpRuns
from tfcluster.runtime.partition.ordered_exchange import OrderedExchanger
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.programs import Program
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.telemetry.tracer import KERAS, span
from tfcluster.runtime.tensor_types import Gradient

_SUSPICIOUS = 3
"""Warn after this many gradients in a row that every rank has computed."""


def install(session: Session, *, seed: int, strict: bool) -> Hook:
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
    gradients = EagerGradients(session, agreement)
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
            if program.trains:
                gradients.divided += 1
                session.applies += 1
                session.step_rate.applied(program.label)

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
    running: Running = at_once
    if isinstance(group.transport, TensorFlowTransport):
        runs = OpRuns(group, group.transport, new_exchanger)
        new_exchanger, running = runs.exchanger, runs.running
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
        {
            tf_patches.CALL_FUNCTION: hook.call,
            tf_patches.FLAT_CALL: hook.flat_call,
            tf_patches.TAPE_GRADIENT: reduced.gradients,
        }
    )
    eager = {
        patches.OPTIMIZER_APPLY: gradients.apply,
        patches.LOSS_SCALE_APPLY: gradients.apply,
    }
    patches.TABLE.install(eager)
    saving = ChiefOnlySaving(session)
    saving.install()
    PartitionedModels(session, saving, agreement.variables.renew).install()
    refuse_strategies()
    return hook


def variable_paths() -> dict[int, str]:
    """The paths of all of Keras's variables, by the ``id`` of their handles."""
    return {
        id(each.value.handle): each.path
        for each in gc.get_objects()
        if isinstance(each, keras.Variable) and isinstance(each.value, tf.Variable)
    }


class EagerGradients:
    """Gradients that a program computes eagerly: every rank computes all of them.

    So they are equal on all ranks, unless the ranks have different data.
    """

    def __init__(self, session: Session, agreement: Agreement) -> None:
        self._session = session
        self._agreement = agreement
        self.divided = 0
        """How many divided programs that train have run."""
        self._divided_before = 0
        self._undivided = 0
        """How many gradients were computed eagerly, one after another."""

    def apply(
        self,
        original: Callable[..., Any],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The hook on an optimizer that applies gradients."""
        if reduced.applied(grads):
            program_kind.claim_distribution()
        elif (
            tf.executing_eagerly()
            and not program_kind.distributes_itself()
            and not self._session.within("applying")
        ):
            grads = self._agreed(optimizer, list(grads))
        # A wrapped optimizer applies the same gradients.
        with self._session.once("applying"):
            return original(optimizer, grads, *args, **kwargs)

    def _agreed(
        self, optimizer: Optimizer, gradients: list[Gradient]
    ) -> list[Gradient]:
        session = self._session
        if self.divided > self._divided_before:
            # A divided program has computed the gradients, or has trained since.
            self._divided_before, self._undivided = self.divided, 0
            return gradients
        self._undivided += 1
        session.applies += 1
        session.step_rate.applied(optimizer.name)
        if self._undivided == _SUSPICIOUS:
            session.warn(
                f"{user_line()}: every rank computed the same gradient, since it is "
                "computed outside of a tf.function. The result is right, but no faster "
                "than on one machine. Put a step into a function with @tf.function "
                "(in fit: without run_eagerly)"
            )
        session.exchanged()
        if not session.divides:
            return self._means(optimizer, gradients)
        found = [tf.nest.flatten(each, expand_composites=True) for each in gradients]
        tensors = self._agreement.on(
            f"gradients of {optimizer.name}", [t for each in found for t in each]
        )
        rest = iter(tensors)
        return [
            tf.nest.pack_sequence_as(
                gradient, [next(rest) for _ in parts], expand_composites=True
            )
            for gradient, parts in zip(gradients, found, strict=True)
        ]

    def _means(self, optimizer: Optimizer, gradients: list[Gradient]) -> list[Gradient]:
        """The means over the ranks, each of which has a batch of its own."""
        places = [i for i, each in enumerate(gradients) if each is not None]
        tensors = [tf.convert_to_tensor(gradients[i]) for i in places]
        size = self._session.size
        arrays = [
            np.asarray(each) / each.dtype.as_numpy_dtype(size) for each in tensors
        ]
        words = tuple(
            tensor_words(f"gradient {i}", each.dtype.name, each.shape)
            for i, each in zip(places, tensors, strict=True)
        )
        signature = Signature(f"gradients of {optimizer.name}", words)
        means = reduce_arrays(self._session.group, arrays, ReduceOp.SUM, signature)
        found = list(gradients)
        for place, tensor, mean in zip(places, tensors, means, strict=True):
            found[place] = tf.constant(mean, tensor.dtype)
        return found


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


class StopAgreement(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Begins with the chief's variables, and stops on all ranks at the same time.

    A callback of the program may decide by a clock, and a file may be on one host only.
    """

    def __init__(
        self, session: Session, renew: Callable[[], None], *, in_epochs: bool
    ) -> None:
        super().__init__()
        self._session = session
        self._renew = renew
        self._in_epochs = in_epochs

    def on_train_begin(self, logs: Logs | None = None) -> None:
        first = str(internals.initial_epoch(self.model) or 0)
        first = self._session.agreed(first, "first epoch")
        internals.set_initial_epoch(self.model, int(first) or None)
        self._renew()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._in_epochs:
            self._stop_together()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._stop_together()

    def _stop_together(self) -> None:
        stops = np.array([bool(self.model.stop_training)], np.int64)
        anywhere = reduce_arrays(
            self._session.group, [stops], ReduceOp.MAX, Signature("whether to stop")
        )
        self.model.stop_training = bool(anywhere[0][0])


class PartitionedModels:
    """The hooks on the methods of a model that print or take callbacks.

    ``renew`` is called when ``fit`` begins; without it, ranks may end at any time.
    """

    def __init__(
        self,
        session: Session,
        files: ChiefOnlySaving,
        renew: Callable[[], None] | None = None,
    ) -> None:
        self._session = session
        self._files = files
        self._renew = renew

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._evaluate,
                patches.MODEL_PREDICT: self._predict,
            }
        )

    def _fit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.fit(original, *args, **kwargs)

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.evaluate(original, *args, **kwargs)

    def _predict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._session.once("predicting"):
            return self.evaluate(original, *args, **kwargs)

    def fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``fit``, the function ``original``."""
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        arguments = bound.arguments

        def change(callbacks: Sequence[Callback]) -> list[Callback]:
            return [*self.around(callbacks), FitPosition(self._session.reporter)]

        self._print_on_the_chief(arguments)
        tracer = self._session.group.tracer
        with (
            changed_callbacks(arguments.get("callbacks"), model, change) as changed,
            translated(),
            self._session.entering(),
            span(tracer, KERAS, f"fit of {model.name}") if tracer else nullcontext(),
            self._session.reporter.keeping_position(),
        ):
            arguments["callbacks"] = changed
            return original(*bound.args, **bound.kwargs)

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """The program's callbacks and the strategy's."""
        found = with_chief_only_files(callbacks, self._session, self._files)
        if self._renew is not None:
            in_epochs = any(map(looks_at_batches, callbacks))
            stop = StopAgreement(self._session, self._renew, in_epochs=in_epochs)
            found.append(stop)
        return found

    def evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``evaluate`` or ``predict``, the function ``original``."""
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        if not self._session.inside_keras:
            callbacks = bound.arguments.get("callbacks")
            bound.arguments["callbacks"] = for_evaluation(callbacks, self._session)
            self._print_on_the_chief(bound.arguments)
        with translated(), self._session.entering():
            return original(*bound.args, **bound.kwargs)

    def _print_on_the_chief(self, arguments: dict[str, Any]) -> None:
        """Let only the chief print the progress of a call."""
        if not self._session.chief:
            arguments["verbose"] = 0

"""Gradients that no function computes, and the count of training steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.reduce_engine import Exchange, reduce_tensors
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.exchange.wire_format import Reduction
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.tf_variables import held, raw
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Optimizer
from tfcluster.runtime.partition.agreement import Agreement
from tfcluster.runtime.partition.script_lines import user_line
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.tensor_types import Gradient

_SUSPICIOUS = 3
"""Warn after this many gradients in a row that every rank has computed."""


class OptimizerSteps:
    """Counts the steps of all optimizers, also those that run within functions."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._known: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        """The steps of optimizers that were counted."""

    def watch(self, optimizer: Optimizer) -> None:
        """Count the steps of this optimizer from now on."""
        if optimizer not in self._known:
            with tf.init_scope():
                self._known[optimizer] = _steps_of(optimizer)

    def count(self, label: str | None = None) -> None:
        """Count the steps since the last call.

        If there are none, a function called ``label`` has trained without an optimizer.
        """
        session, stepped = self._session, False
        for optimizer, before in list(self._known.items()):
            now = self._known[optimizer] = _steps_of(optimizer)
            for _ in range(now - before):
                stepped = True
                session.applies += 1
                session.step_rate.applied(session.optimizer_names.of(optimizer))
        if label is not None and not stepped:
            session.applies += 1
            session.step_rate.applied(label)

    def after_call(self, original: Callable[..., Any], *args: Any) -> Any:
        """The hook on functions of a process that trains alone."""
        result = original(*args)
        if threading.current_thread() is threading.main_thread():
            self.count()
        return result


def _steps_of(optimizer: Optimizer) -> int:
    return int(held(raw(internals.iterations_of(optimizer)))[0].numpy())


class EagerGradients:
    """Gradients that a program computes eagerly: every rank computes all of them.

    So they are equal on all ranks, unless the ranks have different data.
    """

    def __init__(
        self, session: TrainingSession, agreement: Agreement, steps: OptimizerSteps
    ) -> None:
        self._session = session
        self._steps = steps
        self._agreement = agreement
        self.divided = 0
        """How many divided programs that train have run."""
        self.of_tape = False
        """Whether a divided program has computed gradients for an eager tape.

        What the tape adds to them may differ between the ranks.
        """
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
        with SIGNALS:
            return self._apply(original, optimizer, grads, *args, **kwargs)

    def _apply(
        self,
        original: Callable[..., Any],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if reduced.applied(grads):
            program_kind.claim_distribution()
        elif (
            self._session.group.size > 1
            and tf.executing_eagerly()
            and not program_kind.distributes_itself()
            and not self._session.within("applying")
        ):
            grads = self._agreed(optimizer, list(grads))
        self._steps.watch(optimizer)
        # A wrapped optimizer applies the same gradients.
        with self._session.once("applying"):
            result = original(optimizer, grads, *args, **kwargs)
        if tf.executing_eagerly():
            self._steps.count()
        return result

    def _agreed(
        self, optimizer: Optimizer, gradients: list[Gradient]
    ) -> list[Gradient]:
        session = self._session
        was_divided = self.divided > self._divided_before
        self._divided_before = self.divided
        is_whole = not was_divided and not self.of_tape
        self._undivided = self._undivided + 1 if is_whole else 0
        self.of_tape = False
        if self._undivided == _SUSPICIOUS:
            session.warn(
                f"{user_line()}: every rank computed the same gradient, since it is "
                "computed outside of a tf.function. The result is right, but no faster "
                "than on one machine. Put a step into a function with @tf.function "
                "(in fit: without run_eagerly)"
            )
        session.reporter.exchanged()
        if not session.divides:
            # Also of gradients that are equal already, since that changes nothing.
            return self._means(optimizer, gradients)
        if was_divided:
            # A divided program has computed the gradients, or has trained since.
            return gradients
        tensors = tf.nest.flatten(gradients, expand_composites=True)
        places = [i for i, tensor in enumerate(tensors) if tensor is not None]
        what = f"gradients of {optimizer.name}"
        results = self._agreement.on(what, [tensors[i] for i in places])
        for place, tensor in zip(places, results, strict=True):
            tensors[place] = tensor
        return tf.nest.pack_sequence_as(gradients, tensors, expand_composites=True)

    def _means(self, optimizer: Optimizer, gradients: list[Gradient]) -> list[Gradient]:
        """The means over the ranks, each of which has a batch of its own."""
        exchange = Exchange(
            f"gradients of {optimizer.name}",
            Reduction(ReduceOp.AVERAGE),
            differentiable=False,
        )
        dense = [one if one is None else tf.convert_to_tensor(one) for one in gradients]
        names = [f"gradient {place}" for place in range(len(dense))]
        return reduce_tensors(exchange, dense, names)

"""All-reduce gradients inside TensorFlow, eagerly and in graphs.

The mean is weighted by each rank's rows. The layers' variables are sent along with the
gradients, and checks may compare the ranks.
``graph_order`` keeps the exchanges of a graph in program order, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.collectives import Check, mean_of_gradients
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.tensor_list import Kind, TensorList, exchange_list
from tfcluster.runtime.exchange.wire_format import (
    Reduction,
    WireTensor,
    compression_named,
    to_wire,
    uncompressed,
    widened,
)
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.process_group import context
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import as_tensor, name_of


class Watch(Protocol):
    """Compares the ranks' state during the exchanges of a trace."""

    def inputs(self) -> list[Tensor]:
        """Tensors whose values ``look`` needs, of any shapes and dtypes."""
        ...

    def look(self, *inputs: Array) -> Check:
        """Look at this rank's state. Called right before each exchange.

        ``inputs`` are the values of the tensors of ``inputs()``, in their order.
        """
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The optimizer or tape that gradients are computed for."""

    name: Callable[[], str]
    """Its name in messages, equal on all ranks; called when the exchange runs."""
    step: str
    """A name shared by gradients that occur exactly once per step."""
    names: set[str] = field(default_factory=set)
    """The names it has had so far: an optimizer may become known only later."""

    @classmethod
    def of(cls, optimizer: str) -> Target:
        """The target for an optimizer of this name."""
        return cls(lambda: optimizer, optimizer)


def exchange(
    session: Session,
    target: Target,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    state: Sequence[Variable],
    watch: Watch | None = None,
    *,
    chiefs_count: bool = False,
) -> list[Gradient]:
    """Average gradients (None, tensors or IndexedSlices) over the ranks, by rows.

    A gradient has the shape of its variable and a floating dtype; so has its average.
    The average is ``sum(rows_r * g_r) / sum(rows_r)``; see ``mean_of_gradients``. The
    variables in ``state``, which layers update from their data, are set to their
    average. An entry must be None on all ranks or on none, and stays None. With
    ``chiefs_count`` the result is the chief's gradients. ``watch`` compares the ranks.

    Raises TypeError for dtypes that cannot be averaged, and CollectiveError if XLA
    would compile it. Raises CollectiveMismatchError on all ranks if names, shapes or
    dtypes differ, what ``watch`` and ``Trials.judge`` raise, and another
    CollectiveError if a rank is lost or late; in a graph, when the op runs.
    """
    if all(gradient is None for gradient in gradients):
        return list(gradients)
    words = [
        Kind.of(gradient).words(
            name_of(variable),
            "" if gradient is None else gradient.dtype.name,
            variable.shape,
        )
        for variable, gradient in zip(variables, gradients, strict=True)
    ]
    words += [tensor_words(name_of(v), v.dtype, v.shape) for v in state]
    tensors = TensorList.of([*gradients, *map(tf.convert_to_tensor, state)])
    step = _Step(
        session,
        target,
        tuple(words),
        tensors.dense_count - len(state),
        watch,
        chiefs_count=chiefs_count,
    )
    means, _ = exchange_list(
        tensors,
        step.wire_tensors(tensors),
        step.combine,
        exchange_in_order,
        context=step.context(),
    )
    averaged = means.tensors()
    for variable, mean in zip(state, averaged[len(gradients) :], strict=True):
        # Not by Keras's assign, which would look like an assignment of the program.
        raw(variable).assign(as_tensor(mean))
    return averaged[: len(gradients)]


class _Step:
    """The exchange of one trace; it runs in every step."""

    def __init__(
        self,
        session: Session,
        target: Target,
        words: tuple[str, ...],
        dense: int,
        watch: Watch | None,
        *,
        chiefs_count: bool,
    ) -> None:
        self._session = session
        self._target = target
        self._words = words
        self._dense = dense
        """The number of gradients among the dense tensors; layers' variables follow."""
        self._watch = watch
        self._chiefs_count = chiefs_count
        self._rows = StepRows(session)
        self._signatures: dict[str, Signature] = {}

    def wire_tensors(self, tensors: TensorList) -> list[WireTensor]:
        """Compress dense gradients, but neither slices nor layers' variables."""
        compressed = Reduction(
            ReduceOp.AVERAGE,
            compression=compression_named(context().options.compression),
        )
        flat = tensors.flat
        return [
            *(to_wire(t, compressed, "gradients") for t in flat[: self._dense]),
            *map(uncompressed, flat[self._dense : tensors.dense_count]),
            *map(widened, flat[tensors.dense_count : tensors.summed_count]),
        ]

    def context(self) -> list[Tensor]:
        """Tensors whose values ``combine`` needs."""
        share = self._session.share
        trial = tf.convert_to_tensor(share is not None and share.trial)
        watched = self._watch.inputs() if self._watch else []
        return [trial, *self._rows.inputs, *watched]

    def combine(
        self, context: Sequence[Array], dense: Sequence[Array], sparse: list[Slices]
    ) -> tuple[Sequence[Array], Sequence[Slices], Sequence[Array]]:
        """See ``tensor_list.Combine``."""
        session, (trial, *rest) = self._session, context
        count = len(self._rows.inputs)
        rows, watched = rest[:count], rest[count:]
        in_loop = self._rows.in_loop
        weight = float(session.chief) if self._chiefs_count else self._rows.of(rows)
        may_be_undivided = in_loop and not self._chiefs_count
        name = self._target.name()
        means, slices = mean_of_gradients(
            session.group,
            dense,
            [_as_on_one_machine(session, each) for each in sparse]
            if may_be_undivided
            else sparse,
            weight=weight,
            signature=self._signature(name),
            bucket_bytes=session.bucket_bytes,
            check=self._watch.look(*watched) if self._watch else None,
        )
        if self._chiefs_count:
            return means, slices, ()
        session.last_rows = weight
        judged = False
        if session.trials and (session.loop.share.trial if in_loop else trial):
            # Repeated rows also repeat the slices' indices, so judge their sums.
            sums = [each.values.sum(axis=0, keepdims=True) for each in sparse]
            judged = session.trials.judge(name, [*dense[: self._dense], *sums])
        target = self._target
        session.applied(name, in_loop=in_loop, judged=judged, step=target.step)
        target.names.add(name)
        if judged:
            session.loop.unjudged -= target.names
        return means, slices, ()

    def _signature(self, name: str) -> Signature:
        signature = self._signatures.get(name)
        if signature is None:
            signature = self._signatures[name] = Signature(
                f"gradients of {name}", self._words
            )
        return signature


def _as_on_one_machine(session: Session, slices: Slices) -> Slices:
    """Slices in which an optimizer finds each row as often as on one machine.

    Keras's Adam squares the values of each slice separately. So repeated indices are
    not summed, and of slices that all ranks have in common only the chief's are kept,
    times the number of ranks.
    """
    if session.divides and not session.loop.divided:
        values, indices = slices.values, slices.indices
        if not session.chief:
            return Slices(values[:0], indices[:0])
        return Slices(values * values.dtype.type(session.size), indices)
    return slices

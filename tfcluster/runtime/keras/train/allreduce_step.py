"""One rank's part of an all-reduce of gradients, when the op runs.

``gradient_allreduce`` and ``overlapped_allreduce`` create the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.background_exchange import BackgroundExchange
from tfcluster.runtime.collective.buckets import Bucket, Item
from tfcluster.runtime.collective.collectives import Check
from tfcluster.runtime.collective.gradient_mean import (
    Available,
    Means,
    mean_of,
)
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.exchange.tensor_list import Kind, TensorList
from tfcluster.runtime.exchange.wire_format import (
    Reduction,
    WireTensor,
    compression_named,
    to_wire,
    uncompressed,
    widened,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.train.common_indices import marked
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.process_group import context
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import name_of


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
    """The optimizer or tape for which gradients are computed."""

    name: Callable[[], str]
    """Returns its name in messages, equal on all ranks; called when the exchange runs.
    """
    step: str
    """A name shared by gradients that occur exactly once per step."""
    names: set[str] = field(default_factory=set)
    """The names that it has had so far: an optimizer may become known only later."""

    @classmethod
    def of(cls, optimizer: str) -> Target:
        """The target for an optimizer of this name."""
        return cls(lambda: optimizer, optimizer)


@dataclass(frozen=True, slots=True)
class _Now:
    """The step's state when its exchange begins."""

    name: str
    weight: float
    trial: bool
    check: Check | None


def words_of(
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    state: Sequence[Variable],
) -> tuple[str, ...]:
    """The entries of the signature of an exchange: see ``gradient_allreduce``."""
    words = [
        Kind.of(gradient).words(
            name_of(variable),
            "" if gradient is None else gradient.dtype.name,
            variable.shape,
        )
        for variable, gradient in zip(variables, gradients, strict=True)
    ]
    words += [tensor_words(name_of(v), v.dtype, v.shape) for v in state]
    return tuple(words)


class AllreduceStep:
    """The exchange of one trace; it runs in every step.

    ``words`` are the entries of its signature. ``dense`` is the number of gradients
    among the dense tensors; layers' variables follow. ``may_be_common`` says it of the
    indices of each sparse gradient. The other arguments are as for
    ``gradient_allreduce.exchange``.
    """

    def __init__(
        self,
        session: Session,
        target: Target,
        words: tuple[str, ...],
        dense: int,
        watch: Watch | None,
        may_be_common: Sequence[bool],
        *,
        chiefs_count: bool,
    ) -> None:
        self._session = session
        self._target = target
        self._words = words
        self._dense = dense
        self._watch = watch
        self._may_be_common = may_be_common
        self._chiefs_count = chiefs_count
        self._rows = StepRows(session)
        self._signatures: dict[str, Signature] = {}
        self._options = session.mean_options((target.step, words))
        self._background: tuple[_Now, BackgroundExchange] | None = None
        self._judged: dict[int, Array] = {}
        """This rank's gradients of a trial, by their positions."""

    def wire_tensors(self, tensors: TensorList) -> list[WireTensor]:
        """Compress dense gradients, but neither slices nor layers' variables.

        If the transport rounds the data that it sends, they are not compressed here.
        """
        compression = context().options.compression
        if self._options.rounding is not None:
            compression = "none"
        compressed = Reduction(
            ReduceOp.AVERAGE, compression=compression_named(compression)
        )
        flat = tensors.flat
        return [
            *(to_wire(t, compressed, "gradients") for t in flat[: self._dense]),
            *map(uncompressed, flat[self._dense : tensors.dense_count]),
            *map(widened, flat[tensors.dense_count : tensors.summed_count]),
        ]

    def context(self) -> list[Tensor]:
        """Tensors whose values ``combine`` and ``begin`` need."""
        share = self._session.share
        trial = tf.convert_to_tensor(share is not None and share.trial)
        watched = self._watch.inputs() if self._watch else []
        return [trial, *self._rows.inputs, *watched]

    def combine(
        self, context: Sequence[Array], dense: Sequence[Array], sparse: list[Slices]
    ) -> tuple[Sequence[Array], Sequence[Slices], Sequence[Array]]:
        """See ``tensor_list.Combine``."""
        with self._abandoning():
            return self._combined(self._now(context), dense, sparse)

    def _combined(
        self, now: _Now, dense: Sequence[Array], sparse: list[Slices]
    ) -> tuple[Sequence[Array], Sequence[Slices], Sequence[Array]]:
        means = mean_of(
            self._session.group,
            Available(dense, self._counted(now, sparse), len(dense) - self._dense),
            self._options,
            now.weight,
            self._signature(now.name),
            now.check,
        )
        self._done(now, means, dense[: self._dense], sparse)
        return means.dense, means.sparse, ()

    # --- the same in parts, while gradients are being computed -----------------------

    def buckets(self, items: Sequence[Item]) -> list[Bucket]:
        """The buckets in which ``begin`` expects the gradients, in order.

        ``items`` are all dense arrays.
        """
        late = len(items) - self._dense
        found = self._options.buckets(items, late)
        return [bucket for bucket in found if bucket[0] < self._dense]

    def begin(self, items: Sequence[Item], context: Sequence[Array]) -> None:
        """Begin the exchange in a thread. Raises CollectiveError."""
        now = self._now(context)
        self._judged = {}
        self._background = (
            now,
            BackgroundExchange(
                self._session.group,
                items,
                len(items) - self._dense,
                self._options,
                now.weight,
                self._signature(now.name),
                now.check,
            ),
        )

    def hand_over(self, bucket: Bucket, arrays: Sequence[Array]) -> None:
        """Give the thread the gradients of a bucket.

        Raises what the exchange has raised so far.
        """
        assert self._background is not None
        now, background = self._background
        if now.trial:
            self._judged.update(zip(bucket, arrays, strict=True))
        background.hand_over(bucket, arrays)

    def receive(self, bucket: Bucket) -> Sequence[Array]:
        """The means of a bucket, once all buckets have been handed over; waits.

        Raises what the exchange raises, and what comparing the ranks raises.
        """
        assert self._background is not None
        now, background = self._background
        with self._abandoning():
            if now.check is not None:
                # No gradient may be applied before the ranks have been compared.
                now.check.compared(background.notes())
                self._background = replace(now, check=None), background
            return background.means(bucket)

    def finish(
        self, late: Sequence[Array], sparse: Sequence[Slices]
    ) -> tuple[Sequence[Array], Sequence[Slices]]:
        """Give the exchange the remaining tensors, wait for it, and return all means.

        Raises what the exchange raises.
        """
        assert self._background is not None
        now, background = self._background
        self._background = None
        with self._abandoning():
            means = background.result(late, self._counted(now, sparse))
            dense = [self._judged[place] for place in sorted(self._judged)]
            self._judged = {}
            self._done(now, means, dense, sparse)
        return means.dense, means.sparse

    # ---------------------------------------------------------------------------------

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """If the exchange fails within this context, abandon the step's batches."""
        try:
            yield
        except CollectiveError:
            self._session.loop.abandon_step()
            raise

    def _now(self, context: Sequence[Array]) -> _Now:
        session, (trial, *rest) = self._session, context
        count = len(self._rows.inputs)
        rows, watched = rest[:count], rest[count:]
        judges = bool(session.trials) and not self._chiefs_count
        in_loop = self._rows.in_loop
        return _Now(
            self._target.name(),
            float(session.chief) if self._chiefs_count else self._rows.of(rows),
            judges and bool(session.loop.share.trial if in_loop else trial),
            self._watch.look(*watched) if self._watch else None,
        )

    def _counted(self, now: _Now, sparse: Sequence[Slices]) -> Sequence[Slices]:
        if self._rows.in_loop and not self._chiefs_count:
            sparse = [_as_on_one_machine(self._session, each) for each in sparse]
        return [
            marked(each, now.weight, may_be_common=common)
            for each, common in zip(sparse, self._may_be_common, strict=True)
        ]

    def _done(
        self,
        now: _Now,
        means: Means,
        dense: Sequence[Array],
        sparse: Sequence[Slices],
    ) -> None:
        """Compare and record what was exchanged; judge the gradients of a trial."""
        session, target = self._session, self._target
        if now.check is not None:
            now.check.compared(means.notes)
        if self._chiefs_count:
            return
        session.last_rows = now.weight
        judged = False
        if now.trial and session.trials is not None:
            # Repeated rows also repeat the slices' indices, so judge their sums.
            sums = [each.values.sum(axis=0, keepdims=True) for each in sparse]
            judged = session.trials.judge(now.name, [*dense, *sums])
        in_loop = self._rows.in_loop
        session.applied(now.name, in_loop=in_loop, judged=judged, step=target.step)
        target.names.add(now.name)
        if judged:
            session.loop.unjudged -= target.names

    def _signature(self, name: str) -> Signature:
        signature = self._signatures.get(name)
        if signature is None:
            signature = Signature(f"gradients of {name}", self._words)
            signature = self._signatures[name] = self._options.signature(signature)
        return signature


def _as_on_one_machine(session: Session, slices: Slices) -> Slices:
    """Slices in which an optimizer finds each row as often as on one machine.

    Keras's Adam squares the values of each slice separately. So repeated indices are
    not summed, unless they do not come from rows (``Slices.common``). If all ranks have
    the same slices, only the chief's are kept, multiplied by the number of ranks.
    """
    if session.divides and not session.loop.divided:
        values, indices = slices.values, slices.indices
        if not session.chief:
            return Slices(values[:0], indices[:0])
        return Slices(values * values.dtype.type(session.size), indices)
    return slices

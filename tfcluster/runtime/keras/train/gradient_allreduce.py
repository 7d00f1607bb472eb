"""Exchange gradients inside TensorFlow, eagerly and in graphs.

The exchange itself is plain numpy and runs as a stateful op. ``graph_order`` keeps such
ops of a graph in the order in which they were written, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime.collective import Layout, tensor_words
from tfcluster.runtime.collective.collectives import Check, mean_of_gradients
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.compression import compression_named
from tfcluster.runtime.exchange.gradient_split import split, stitch
from tfcluster.runtime.exchange.replica_gradients import is_sparse
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.tf_variables import name_of, raw
from tfcluster.runtime.process_group import context

_SUMMED_WIDER = (tf.float16, tf.bfloat16)
"""Rows of these are added up in float32, for range and precision."""


class Watch(Protocol):
    """Compares what the ranks train, beside the exchanges of a trace."""

    def inputs(self) -> list[Any]:
        """Tensors whose values ``look`` needs."""
        ...

    def look(self, *inputs: Array) -> Check:
        """At what this rank has; called once for each exchange, right before it."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What gradients are for."""

    name: Callable[[], str]
    """How messages call it, the same on all ranks; asked when the exchange runs."""
    step: str
    """The same for the gradients that come once in each step."""
    names: set[str] = field(default_factory=set)
    """Those that it has had: of the optimizers that are known by then."""

    @classmethod
    def of(cls, optimizer: str) -> Target:
        return cls(lambda: optimizer, optimizer)


def exchange(
    session: Session,
    target: Target,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    state: Sequence[Any],
    watch: Watch | None = None,
    *,
    chiefs_count: bool = False,
) -> list[Any]:
    """The gradients (None, tensors or IndexedSlices), averaged over the ranks by rows.

    The variables in ``state``, which layers update from the data that they see, are set
    to their average. None stays None, on all ranks or none. With ``chiefs_count`` the
    chief's gradients are those of all. ``watch`` compares what the ranks train.
    """
    words = [
        _words(variable, gradient)
        for variable, gradient in zip(variables, gradients, strict=True)
    ]
    words += [tensor_words(name_of(v), v.dtype, v.shape) for v in state]
    without, given = split(gradients, lambda gradient: gradient is None)
    (sparse, sparse_places), (dense, dense_places) = split(given[0], is_sparse)
    if not given[0]:
        return list(gradients)
    compression = compression_named(context().options.compression)
    small = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in dense]
    values = [tf.convert_to_tensor(variable) for variable in state]
    means, gathered = _means(
        session,
        [tensor for tensor, _ in small],
        values,
        sparse,
        tuple(words),
        target,
        watch,
        chiefs_count=chiefs_count,
    )
    for variable, mean in zip(state, means[len(dense) :], strict=True):
        # Not by Keras's method: that would look like an assignment of the program.
        raw(variable).assign(mean)
    whole = [
        compression.decompress(mean, kept)
        for mean, (_, kept) in zip(means[: len(small)], small, strict=True)
    ]
    found = stitch([(whole, dense_places), (gathered, sparse_places)])
    return stitch([without, (found, given[1])])


def _words(variable: Any, gradient: Any) -> str:
    if gradient is None:
        return f"{name_of(variable)} without gradient"
    kind = "rows of " if is_sparse(gradient) else ""
    return kind + tensor_words(name_of(variable), gradient.dtype.name, variable.shape)


def _means(
    session: Session,
    gradients: Sequence[Any],
    state: Sequence[Any],
    sparse: Sequence[Any],
    words: tuple[str, ...],
    target: Target,
    watch: Watch | None,
    *,
    chiefs_count: bool,
) -> tuple[list[Any], list[Any]]:
    dense = [*gradients, *state]
    layouts: dict[str, Layout] = {}

    def run(rows: Any, trial: Any, *given: Any) -> list[Any]:
        told, arrays = given[: len(watched)], given[len(watched) :]
        in_loop = bool(rows < 0)
        weight = session.loop.rows if in_loop else float(rows)
        alike = in_loop and not chiefs_count
        if chiefs_count:
            weight = float(session.chief)
        name = target.name()
        layout = layouts.get(name)
        if layout is None:
            layout = layouts[name] = Layout(f"gradients of {name}", words)
        plain = arrays[: len(dense)]
        pairs = arrays[len(dense) :]
        means, slices = mean_of_gradients(
            session.group,
            plain,
            [
                _slices_of(session, pairs[i], pairs[i + 1], alike)
                for i in range(0, len(pairs), 2)
            ],
            weight=weight,
            layout=layout,
            bucket_bytes=session.bucket_bytes,
            check=watch.look(*told) if watch else None,
        )
        flat = [array for s in slices for array in (s.values, s.indices)]
        if chiefs_count:
            return [*means, *flat]
        session.last_rows = weight
        judged = False
        if session.trials and (session.loop.trial if in_loop else trial):
            # Of rows that come twice the places do so, too: their sum is the same.
            sums = [values.sum(axis=0, keepdims=True) for values in pairs[::2]]
            judged = session.trials.judge(name, [*plain[: len(gradients)], *sums])
        session.applied(name, in_loop=in_loop, judged=judged, step=target.step)
        target.names.add(name)
        if judged:
            session.loop.unjudged -= target.names
        return [*means, *flat]

    share = session.share
    # A loop of the user's own is told apart by -1: its rows are known when it runs.
    rows = tf.cast(-1.0 if share is None else share.rows, tf.float64)
    trial = tf.convert_to_tensor(share is not None and share.trial)
    inputs = [tf.convert_to_tensor(tensor) for tensor in dense]
    for slices in sparse:
        inputs += [_widened(slices.values), slices.indices]
    types = [tensor.dtype for tensor in inputs]
    watched = watch.inputs() if watch else []
    found = exchange_in_order(run, [rows, trial, *watched, *inputs], types)
    outputs = tf.nest.flatten(found)
    means = []
    for tensor, output in zip(dense, outputs[: len(dense)], strict=True):
        output.set_shape(tensor.shape)
        means.append(output)
    rest = outputs[len(dense) :]
    gathered = [
        _slices(slices, rest[2 * i], rest[2 * i + 1]) for i, slices in enumerate(sparse)
    ]
    return means, gathered


def _slices_of(session: Session, values: Any, indices: Any, in_loop: bool) -> Slices:
    """Slices whose rows an optimizer finds as often as it would on one machine.

    Keras's Adam squares each of them by itself. So those that come more than once are
    not added up (the number of rows of the whole stays untold), and of those that all
    ranks have alike, the chief's count for all.
    """
    if in_loop and session.divides and not session.loop.divided:
        if not session.chief:
            return Slices(values[:0], indices[:0])
        values = values * values.dtype.type(session.size)
    return Slices(values, indices)


def _widened(tensor: Any) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype in _SUMMED_WIDER else tensor


def _slices(local: Any, values: Any, indices: Any) -> Any:
    values.set_shape([None, *local.values.shape[1:]])
    indices.set_shape([None])
    return tf.IndexedSlices(
        tf.cast(values, local.values.dtype), indices, local.dense_shape
    )

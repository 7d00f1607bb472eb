"""The exchange of a step that a rank has computed shard by shard, as one op.

``gradient_allreduce`` does the same for ranks that compute all of their rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from tfcluster.runtime.collective import Signature, tensor_words
from tfcluster.runtime.collective.shard_sums import mean_of_shards
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.tensor_list import Kind, TensorList, flattened
from tfcluster.runtime.exchange.wire_format import widened
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.common_indices import marked, may_be_common
from tfcluster.runtime.keras.train.gradient_allreduce import Target, Watch
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import DType, Gradient, Tensor, Weight
from tfcluster.runtime.tensors import name_of


@dataclass(frozen=True, slots=True)
class ShardGradients:
    """The results that a rank has computed from one of its shards."""

    rows: Weight
    """The number of the shard's rows: a number, or a scalar tensor."""
    gradients: Sequence[Gradient]
    """One for each variable: a tensor of its shape, IndexedSlices, or None."""
    state: Sequence[Tensor]
    """The values of the variables that layers have set, of floating dtypes."""


class Named(Protocol):
    """A variable that layers have set, or another number of each shard."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> Sequence[int]: ...


def exchange_shards(
    session: Session,
    target: Target,
    computed: Sequence[ShardGradients],
    variables: Sequence[Variable],
    state: Sequence[Named],
    watch: Watch | None = None,
) -> tuple[list[Gradient], list[Tensor]]:
    """Average gradients and layers' variables over all ranks' shards, by rows.

    ``computed`` has this rank's shards in their order. The results have the shapes and
    dtypes of what was computed; an entry that is None for all shards stays None. The
    results' bits do not depend on the number of ranks: see ``mean_of_shards``.
    ``watch`` compares the ranks. Raises what ``gradient_allreduce.exchange`` raises.
    """
    first = computed[0]
    if all(gradient is None for gradient in first.gradients) and not first.state:
        return list(first.gradients), list(first.state)
    lists = [TensorList.of([*each.gradients, *each.state]) for each in computed]
    if len({each.kinds for each in lists}) > 1:
        session.refuse(
            f"the gradients for {target.name()} are not of the same kinds for all "
            "shards of a batch: some are None or tf.IndexedSlices where others are "
            "tensors. Run the job without runtime.shards"
        )
    words = [
        Kind.of(gradient).words(
            name_of(variable),
            "" if gradient is None else gradient.dtype.name,
            variable.shape,
        )
        for variable, gradient in zip(variables, first.gradients, strict=True)
    ]
    words += [tensor_words(name_of(v), v.dtype, v.shape) for v in state]
    signatures: dict[str, Signature] = {}
    shape = lists[0]
    dense, summed = shape.dense_count, shape.summed_count
    wires = [[widened(each) for each in one.flat[dense:summed]] for one in lists]
    inputs = [tf.cast(each.rows, tf.float64) for each in computed]
    watched = watch.inputs() if watch else []
    sent = [
        [*one.flat[:dense], *(wire.tensor for wire in wires[i]), *one.indices]
        for i, one in enumerate(lists)
    ]
    common = [list(map(may_be_common, one.indices)) for one in lists]
    count, each = len(computed), len(sent[0])

    def run(*arrays: Array) -> list[Array]:
        weights = [float(rows) for rows in arrays[:count]]
        looked = arrays[count : count + len(watched)]
        rest = arrays[count + len(watched) :]
        found = [
            lists[i].unflattened(rest[i * each : (i + 1) * each]) for i in range(count)
        ]
        assert session.shards is not None
        name = target.name()
        if name not in signatures:
            signatures[name] = Signature(
                f"gradients of {name} in {session.shards} shards", tuple(words)
            )
        means, slices = mean_of_shards(
            session.group,
            session.shards,
            [arrays for arrays, _ in found],
            [
                [
                    marked(one, rows, may_be_common=may)
                    for one, may in zip(slices, mays, strict=True)
                ]
                for (_, slices), rows, mays in zip(found, weights, common, strict=True)
            ],
            weights=weights,
            signature=signatures[name],
            check=watch.look(*looked) if watch else None,
        )
        session.last_rows = sum(weights)
        if variables:
            session.applied(name, in_loop=False, step=target.step)
        return flattened(means, slices)

    results = tf.nest.flatten(
        exchange_in_order(
            run,
            [*inputs, *watched, *(tensor for one in sent for tensor in one)],
            [tensor.dtype for tensor in sent[0]],
        )
    )
    for index, (result, local) in enumerate(zip(results, shape.flat, strict=True)):
        result.set_shape(local.shape if index < dense else [None, *local.shape[1:]])
    for index, wire in enumerate(wires[0]):
        results[dense + index] = wire.restored(results[dense + index])
    means = shape.with_flat(results).tensors()[: len(variables)]
    return means, results[dense - len(state) : dense]

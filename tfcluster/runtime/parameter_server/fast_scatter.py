"""A faster scatter_add for distinct indices.

TensorFlow adds row by row, which takes 0.6 us for a row of 64 numbers. Gathering the
rows, adding all of them at once and copying them back takes a third of that time. But
it would lose one of two additions to the same row. So it is used only with the indices
of a gradient, in a second graph of the update that runs only if no index of the
gradient repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.tensor_types import Gradient, Graph, Operation, Tensor, Variable

Combine: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_READS = ("ReadVariableOp", "ResourceGather", "VariableShape")


@dataclass(frozen=True, slots=True)
class Addition:
    """A replaced scatter: rows at ``indices`` have been set to ``values``.

    ``indices`` has shape (n,) and ``values`` shape (n, ...) and the variable's dtype.
    """

    indices: Tensor
    values: Tensor
    update: Operation
    """The op that sets the rows."""


@contextmanager
def rows_at_once(distinct: Sequence[Tensor]) -> Iterator[dict[int, Addition]]:
    """Replace scatter_add and scatter_sub in graphs traced within this context.

    Only calls whose indices are one of the tensors ``distinct`` are replaced. Yields
    the replaced calls by the id of the variable's handle.
    """
    known = {id(tensor) for tensor in distinct}
    done: dict[int, Addition] = {}
    handlers = {
        tf_patches.SCATTER_ADD: _around(tf.add, known, done),
        tf_patches.SCATTER_SUB: _around(tf.subtract, known, done),
    }
    with tf_patches.TABLE.replaced(handlers):
        yield done


def new_rows(
    graph: Graph, handle: Tensor, done: Mapping[int, Addition]
) -> Tensor | None:
    """The rows' values after ``graph`` has run; None if other ops write to them.

    ``handle`` is the variable's handle outside of the graph.
    """
    addition = done.get(id(handle))
    if addition is None:
        return None
    inner = next(inner for outer, inner in graph.captures if outer is handle)
    writers = [op for op in inner.consumers() if op.type not in _READS]
    return addition.values if writers == [addition.update] else None


def _around(
    combine: Combine,
    known: set[int],
    done: dict[int, Addition],
) -> Callable[..., Any]:
    def scatter(
        original: Callable[..., Any],
        variable: Variable,
        sparse_delta: Gradient,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (
            isinstance(sparse_delta, tf.IndexedSlices)
            and isinstance(sparse_delta.values, tf.Tensor)
            and sparse_delta.values.shape.rank == variable.shape.rank
            and id(sparse_delta.indices) in known
        ):
            return original(variable, sparse_delta, *args, **kwargs)
        handle, indices = variable.handle, sparse_delta.indices
        values = tf.cast(sparse_delta.values, variable.dtype)
        old = tf.raw_ops.ResourceGather(
            resource=handle, indices=indices, dtype=variable.dtype
        )
        values = combine(old, values)
        update = tf.raw_ops.ResourceScatterUpdate(
            resource=handle, indices=indices, updates=values
        )
        done[id(handle)] = Addition(indices, values, update)
        return variable

    return scatter

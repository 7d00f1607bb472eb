"""All-reduce gradients inside TensorFlow, eagerly and in graphs.

The mean is weighted by each rank's rows. The layers' variables are sent along with the
gradients, and checks may compare the ranks.
``graph_order`` keeps the exchanges of a graph in program order, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfcluster.runtime.exchange.tensor_list import TensorList, exchange_list
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.train import overlapped_allreduce
from tfcluster.runtime.keras.train.allreduce_step import (
    AllreduceStep,
    Target,
    Watch,
    words_of,
)
from tfcluster.runtime.keras.train.common_indices import may_be_common
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Gradient
from tfcluster.runtime.tensors import as_tensor

__all__ = ["Target", "Watch", "exchange"]


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
    would compile the exchange. Raises CollectiveMismatchError on all ranks if names,
    shapes or dtypes differ, what ``watch`` and ``Trials.judge`` raise, and another
    CollectiveError if a rank is lost or late. In a graph, the op raises when it runs.
    """
    if all(gradient is None for gradient in gradients):
        return list(gradients)
    session.exchanges += 1
    words = words_of(gradients, variables, state)
    tensors = TensorList.of([*gradients, *map(tf.convert_to_tensor, state)])
    step = AllreduceStep(
        session,
        target,
        words,
        tensors.dense_count - len(state),
        watch,
        list(map(may_be_common, tensors.indices)),
        chiefs_count=chiefs_count,
    )
    wire_tensors = step.wire_tensors(tensors)
    overlaps = overlapped_allreduce.pays(session.group, tensors, wire_tensors)
    if overlaps:
        means = overlapped_allreduce.exchange(step, tensors, wire_tensors)
    else:
        means, _ = exchange_list(
            tensors,
            wire_tensors,
            step.combine,
            exchange_in_order,
            context=step.context(),
        )
    averaged = means.tensors()
    for variable, mean in zip(state, averaged[len(gradients) :], strict=True):
        # Not with Keras's assign, which would look like an assignment by the program.
        raw(variable).assign(as_tensor(mean))
    return averaged[: len(gradients)]

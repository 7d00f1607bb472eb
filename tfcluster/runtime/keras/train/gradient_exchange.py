"""Average gradients over the ranks: in the graph if that is possible, else on the host.

``graph_allreduce`` needs the transport ``tensorflow``, and a step of ``fit``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.runtime.keras.checks.divergence_check import Watch
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train import gradient_allreduce, graph_allreduce
from tfcluster.runtime.keras.train.gradient_allreduce import Target
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Gradient


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
    """Average gradients over the ranks, by rows: see ``gradient_allreduce.exchange``.

    Arguments, result and errors are the same.
    """
    steps = session.graph_steps
    if steps is not None and graph_allreduce.is_possible(session, gradients, state):
        if all(gradient is None for gradient in gradients):
            return list(gradients)
        return graph_allreduce.exchange(
            session,
            steps,
            target,
            gradients,
            variables,
            state,
            watch,
            chiefs_count=chiefs_count,
        )
    return gradient_allreduce.exchange(
        session,
        target,
        gradients,
        variables,
        state,
        watch,
        chiefs_count=chiefs_count,
    )

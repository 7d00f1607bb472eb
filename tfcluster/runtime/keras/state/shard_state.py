"""The variables that layers set while a rank computes one shard after the other.

Every shard begins with the values before the step: its layers draw the same random
numbers on any number of ranks, and moving averages do not follow one shard after the
other. Afterwards a moving average becomes the mean over the shards; the state of a seed
generator is the same after each shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.tf_variables import have_values, raw
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Graph, Tensor
from tfcluster.runtime.tensors import name_of

_ADVICE = (
    "Run the job without runtime.shards, or leave such variables to Keras's layers"
)


@dataclass(slots=True)
class _Step:
    """The step that is being traced or that runs eagerly."""

    graph: Graph | None
    """The graph of the step; None: it runs eagerly."""
    variables: dict[int, Variable] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    """The values before the step, by the variable's id."""
    assigned: set[int] = field(default_factory=set)
    """The variables that the shard being computed has set."""
    seen: set[int] = field(default_factory=set)
    """The ids of the handles of all variables of Keras that have been set."""
    after: list[dict[int, Tensor]] = field(default_factory=list)
    """For each shard, the values of the variables that it has set."""


class ShardState:
    """Restores variables after each shard, and keeps what each shard has set them to.

    ``begin``, ``end_of_shard`` for each shard, and ``finish`` are called in this order.
    """

    def __init__(self, session: Session, layer_state: MovingStatistics) -> None:
        self._session = session
        self._layer_state = layer_state
        self._step: _Step | None = None

    def begin(self, variables: Iterable[Variable]) -> None:
        """Begin a step of a model with these variables that are not trained."""
        step = self._step = _Step(graph_now())
        for variable in variables:
            if not _is_of_metric(variable) and have_values([variable]):
                self._remember(step, variable)

    def assigned(self, variable: Variable) -> None:
        """Record that ``variable`` is about to be set, while a shard is computed.

        Raises CollectiveError if code of the program does it: what it makes of the rows
        is not known.
        """
        step = self._step
        if step is None or internals.in_stateless_scope():
            return
        step.seen.add(id(raw(variable).handle))
        if self._session.within("update_state") or _is_of_metric(variable):
            return
        if variable.name != internals.SEED_STATE:
            layer = self._layer_state.innermost_layer()
            if internals.call_context() is None or layer is None:
                self._refuse(variable, "the program's own step")
            elif not internals.is_of_keras(type(layer)):
                self._refuse(variable, f"the program's own layer {layer.name}")
        if id(variable) not in step.before:
            if step.graph is not graph_now():
                self._refuse(variable, "a conditional or a loop")
            self._remember(step, variable)
        step.assigned.add(id(variable))

    def end_of_shard(self, *, counts: bool = True) -> None:
        """Restore the variables. Without ``counts``, forget what the shard has set."""
        step = self._step
        assert step is not None
        found = {}
        for place in step.before:
            if place in step.assigned:
                variable = raw(step.variables[place])
                found[place] = tf.identity(tf.convert_to_tensor(variable))
                variable.assign(step.before[place])
        step.assigned.clear()
        if counts:
            step.after.append(found)

    def averages(self) -> tuple[list[Variable], list[list[Tensor]]]:
        """The variables whose mean over the shards is to be taken, and their values.

        The second result has, for each shard, a tensor for each variable, of its shape.
        """
        step = self._step
        assert step is not None
        places = [place for place in step.before if self._is_average(step, place)]
        values = [
            [after.get(place, step.before[place]) for place in places]
            for after in step.after
        ]
        return [step.variables[place] for place in places], values

    def finish(self, means: Sequence[Tensor]) -> None:
        """Set the variables: those of ``averages`` to ``means``, others as set last."""
        step = self._step
        assert step is not None
        averaged, _ = self.averages()
        for variable, mean in zip(averaged, means, strict=True):
            # Not by Keras's assign, which would look like an assignment of the program.
            raw(variable).assign(mean)
        known = {id(variable) for variable in averaged}
        last = {place: value for after in step.after for place, value in after.items()}
        for place, value in last.items():
            if place not in known:
                raw(step.variables[place]).assign(value)
        self._step = None

    def finish_without_gradients(self) -> None:
        """Like ``finish``, of a step that applies no gradients.

        Raises CollectiveError if the mean of a variable would have to be taken.
        """
        if self.averages()[0]:
            self._session.refuse(
                "a training step sets variables but applies no gradients. Run the job "
                "without runtime.shards"
            )
        self.finish([])

    def has_seen(self, handle: Tensor) -> bool:
        """Whether Keras has set the variable with this handle in the current step."""
        return self._step is not None and id(handle) in self._step.seen

    def _is_average(self, step: _Step, place: int) -> bool:
        variable = step.variables[place]
        return (
            any(place in after for after in step.after)
            and not variable.trainable
            and bool(tf.as_dtype(variable.dtype).is_floating)
        )

    def _remember(self, step: _Step, variable: Variable) -> None:
        step.variables[id(variable)] = variable
        step.before[id(variable)] = tf.identity(tf.convert_to_tensor(raw(variable)))

    def _refuse(self, variable: Variable, who: str) -> None:
        self._session.refuse(
            f"{who} sets {name_of(variable)} in a training step. With runtime.shards, "
            f"every shard would set it once more. {_ADVICE}"
        )


def graph_now() -> Graph | None:
    """The graph that is being built; None if operations run eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _is_of_metric(variable: Variable) -> bool:
    return getattr(variable, "synchronization", None) == "on_read"

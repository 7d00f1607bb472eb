"""The variables that layers set while a rank computes one shard after the other.

Every shard begins with the values from before the step. So its layers draw the same
random numbers on any number of ranks, and moving averages do not follow one shard after
the other. A shard that waits for the others keeps its own values. When the shards'
gradients are combined, a moving average becomes the mean over the shards; the state of
a seed generator is the same after each shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import tensorflow as tf

from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.tf_variables import have_values, raw
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Graph, Tensor
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import name_of

_ADVICE = (
    "Run the job without runtime.shards, or leave such variables to Keras's layers"
)


@dataclass(slots=True)
class _Step:
    """The step that is being traced or that runs eagerly."""

    graph: Graph | None
    """The graph of the step; None if it runs eagerly."""
    shards: int
    """The number of shards that count."""
    values: list[dict[int, Tensor]]
    """For each shard that waits, the values of the variables that it has set."""
    variables: dict[int, Any] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    """The values before the step, or since the shards were last combined, by the
    variable's id."""
    assigned: set[int] = field(default_factory=set)
    """The variables that the shard being computed has set."""
    seen: set[int] = field(default_factory=set)
    """The ids of the handles of all Keras variables that have been set."""


class ShardState:
    """Gives each shard its own values of the variables that it sets.

    ``begin`` is called first. ``enter`` and ``leave`` are called whenever a shard has
    its turn. ``combine`` is called when all shards wait, and ``finish`` in the end.
    """

    def __init__(self, session: Session, layer_state: MovingStatistics) -> None:
        self._session = session
        self._layer_state = layer_state
        self._step: _Step | None = None
        self.touched = False
        """Whether a layer or a metric has set a variable since this was last set."""

    def begin(self, variables: Iterable[Variable], shards: int, *, trial: bool) -> None:
        """Begin a step of a model with these non-trainable variables.

        With ``trial``, there is an additional last shard, which does not count.
        """
        step = self._step = _Step(
            graph_now(), shards, [{} for _ in range(shards + trial)]
        )
        for variable in variables:
            if not _is_of_metric(variable) and have_values([variable]):
                self._remember(step, variable)

    def is_of_library(self, variable: Variable) -> bool:
        """Record that ``variable`` is about to be set, while a shard is computed.

        Returns whether a layer or a metric of Keras sets it, not the program. Raises
        CollectiveError if a layer of the program sets it, since it is unknown how the
        value depends on the rows.
        """
        step = self._step
        if step is None or internals.in_stateless_scope():
            return True
        if self._session.within("update_state") or _is_of_metric(variable):
            self.touched = True
            step.seen.add(id(raw(variable).handle))
            return True
        if variable.name != internals.SEED_STATE:
            layer = self._layer_state.innermost_layer()
            if internals.call_context() is None or layer is None:
                return False
            if not internals.is_of_keras(type(layer)):
                self.refuse(variable, f"the program's own layer {layer.name}")
        self.touched = True
        step.seen.add(id(raw(variable).handle))
        if id(variable) not in step.before:
            if step.graph is not graph_now():
                self.refuse(variable, "a conditional or a loop")
            self._remember(step, variable)
        step.assigned.add(id(variable))
        return True

    def enter(self, shard: int) -> None:
        """Give the variables the values that this shard has set."""
        step = self._known()
        for place, value in step.values[shard].items():
            raw(step.variables[place]).assign(value)

    def leave(self, shard: int) -> None:
        """Keep the values that this shard has set, and restore the values before."""
        step = self._known()
        own = step.values[shard]
        for place in [
            place for place in step.before if place in step.assigned | {*own}
        ]:
            variable = raw(step.variables[place])
            own[place] = tf.identity(tf.convert_to_tensor(variable))
            variable.assign(step.before[place])
        step.assigned.clear()

    def averages(self) -> tuple[list[Variable], list[list[Tensor]]]:
        """The variables to be averaged over the shards, and their values.

        For each shard that counts, the second result has a tensor for each variable, of
        the variable's shape.
        """
        step = self._known()
        own = step.values[: step.shards]
        places = [place for place in step.before if self._is_average(step, place)]
        values = [
            [after.get(place, step.before[place]) for place in places] for after in own
        ]
        return [step.variables[place] for place in places], values

    def combine(self, means: Sequence[Tensor]) -> list[Variable]:
        """Set the variables of ``averages`` to ``means``, others to their last values.

        All shards continue with these values. Returns the variables.
        """
        step = self._known()
        averaged, _ = self.averages()
        new = {id(each): mean for each, mean in zip(averaged, means, strict=True)}
        for after in step.values[: step.shards]:
            new = {**after, **new}
        for place, value in new.items():
            # Not with Keras's assign, which looks like an assignment by the program.
            raw(step.variables[place]).assign(value)
            step.before[place] = tf.identity(value)
        for after in step.values:
            after.clear()
        return [step.variables[place] for place in new]

    def finish(self) -> None:
        """End the step; the shards have been combined."""
        self._step = None

    def changed_by_program(self, variable: Variable | TfVariable) -> None:
        """Record that the program has set a variable, once for all shards."""
        step = self._known()
        step.seen.add(id(raw(variable).handle))
        if id(variable) in step.before:
            self._remember(step, variable)

    def has_seen(self, handle: Tensor) -> bool:
        """Whether Keras has set the variable with this handle in the current step."""
        return self._step is not None and id(handle) in self._step.seen

    def _known(self) -> _Step:
        assert self._step is not None
        return self._step

    def _is_average(self, step: _Step, place: int) -> bool:
        variable = step.variables[place]
        return (
            any(place in after for after in step.values[: step.shards])
            and not variable.trainable
            and bool(tf.as_dtype(variable.dtype).is_floating)
        )

    def _remember(self, step: _Step, variable: Variable | TfVariable) -> None:
        step.variables[id(variable)] = variable
        step.before[id(variable)] = tf.identity(tf.convert_to_tensor(raw(variable)))

    def refuse(self, variable: Variable | TfVariable, who: str) -> NoReturn:
        """Raise CollectiveError: ``who`` sets ``variable`` from a shard's rows."""
        self._session.refuse(
            f"{who} sets {name_of(variable)} in a training step. With runtime.shards, "
            f"every shard would set it again. {_ADVICE}"
        )


def graph_now() -> Graph | None:
    """The graph that is being built; None if operations run eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _is_of_metric(variable: Variable) -> bool:
    return getattr(variable, "synchronization", None) == "on_read"

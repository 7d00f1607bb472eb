"""Which variables layers update from the data that they see, and what becomes of them.

They are found by watching: assigned within a layer's call, not trained. Each rank sees
other rows. What Keras's own layers keep are moving averages: they are averaged together
with the gradients. What a layer of the program's own does is tried out in its first
step (see ``state_updates``), unless the variable's ``aggregation`` says it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tfcluster.runtime.collective import (
    CollectiveError,
    ReduceOp,
    Signature,
    tensor_words,
)
from tfcluster.runtime.collective.collectives import allgather_bytes, reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.checks.output_rows import OutputsByRow
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.train.derived_values import ancestry
from tfcluster.runtime.keras.train.state_trials import Trials
from tfcluster.runtime.keras.train.state_updates import Kind, Trial, agreed, kind_of
from tfcluster.runtime.patching import defining_class, wrap
from tfcluster.runtime.tensors import name_of

_DECLARED = {
    "mean": Kind("mean"),
    "sum": Kind("sum", 1.0),
    "only_first_replica": Kind("chief"),
}

_HOW_TO = (
    "add_weight(..., aggregation='sum') for a sum over rows, 'mean' for an average "
    "over them, 'only_first_replica' for the chief's"
)


@dataclass
class OwnState:
    """A variable that a layer of the program's own sets."""

    variable: weakref.ref[Any]
    before: Any
    """A variable: the value that all ranks had before their batches."""
    changed: Any
    """A variable: whether ``before`` is older than the value."""
    kind: Kind | None = None
    settled: bool = False
    """Whether all ranks know its kind, and the same."""
    tried: Any = None
    """A variable that is written where the kind is found out: a graph runs what reads
    it after that."""


@dataclass
class _Call:
    """A layer that is being called."""

    layer: Any
    untried: list[Any] = field(default_factory=list)
    training: Any = None


class MovingStatistics:
    """Variables that have been assigned while a layer was called."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._averaged: dict[int, weakref.ref[Any]] = {}
        self._own: dict[int, OwnState] = {}
        self._local = threading.local()
        self._trials = Trials()
        self._by_row = OutputsByRow(session)
        self._of_step: list[Any] = []
        """What the step that is going on has set by itself."""

    def install(self) -> None:
        """Know which layer is being called. For ranks that are in step."""
        wrap(defining_class(keras.Layer, "__call__"), "__call__", self._call)

    def among(self, variables: Iterable[Any]) -> list[Any]:
        """Those of ``variables`` that Keras's layers update, in the given order."""
        return [
            variable
            for variable in variables
            if (seen := self._averaged.get(id(variable))) and seen() is variable
        ]

    # --- in the call of a layer -----------------------------------------------------

    def assigned(self, variable: Any, value: Any) -> None:
        """``variable`` is about to be assigned to."""
        if variable.trainable or getattr(self._local, "trying", False):
            return
        if in_stateless_scope():
            return
        context = global_state.get_global_attribute("current_call_ctx")
        if context is None:
            if self._session.share is not None:
                self._assigned_in_step(variable, value)
            return
        calls = self._calls()
        if not calls or _is_kerass(calls[-1].layer):
            if tf.as_dtype(variable.dtype).is_floating:
                self._averaged.setdefault(id(variable), weakref.ref(variable))
            return
        if variable.name == "seed_generator_state":
            return
        calls[-1].training = context.get_value("training")
        own = self._state_of(variable)
        if own.kind is None:
            calls[-1].untried.append(variable)
        self._remember(own)

    def _assigned_in_step(self, variable: Any, value: Any) -> None:
        """By a step of the program's own, which cannot be tried."""
        if getattr(variable, "synchronization", None) == "on_read":
            return  # A metric's: it is reset, and merged when it is read.
        if str(variable.aggregation) in _DECLARED:
            self._remember(self._state_of(variable))
            self._of_step.append(variable)
        elif (
            isinstance(value, tf.Tensor)
            and not tf.executing_eagerly()
            and ancestry(value, {}).sees_data
        ):
            self._session.warn(
                f"a custom step sets {name_of(variable)} from the rows of a batch: "
                "each rank keeps the value from its own rows. Declare its aggregation "
                f"where it is created: {_HOW_TO}"
            )

    def end_of_step(self) -> None:
        """Have what the step has set by itself be of all rows."""
        chosen, self._of_step = self._of_step, []
        share = self._session.share
        if chosen and share is not None and not share.alone:
            self.merge({id(variable): variable for variable in chosen}.values())

    def _remember(self, own: OwnState) -> None:
        """The value that all ranks have, before the first of several assignments."""
        value = tf.convert_to_tensor(raw(own.variable()))
        own.before.assign(tf.where(own.changed, own.before, value))
        own.changed.assign(True)

    def _state_of(self, variable: Any) -> OwnState:
        own = self._own.get(id(variable))
        if own is None or own.variable() is not variable:
            with tf.init_scope():
                own = OwnState(
                    weakref.ref(variable),
                    tf.Variable(tf.convert_to_tensor(raw(variable)), trainable=False),
                    tf.Variable(False, trainable=False),
                    _DECLARED.get(str(variable.aggregation)),
                )
            self._own[id(variable)] = own
        return own

    def _calls(self) -> list[_Call]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        found: list[_Call] = self._local.calls
        return found

    def _call(
        self, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        call = self._enter(layer)
        try:
            result = original(layer, *args, **kwargs)
        finally:
            self._leave()
        if call.untried:
            self._try(call, args, dict(kwargs))
        return result

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _enter(self, layer: Any) -> _Call:
        call = _Call(layer)
        self._calls().append(call)
        return call

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _leave(self) -> None:
        self._calls().pop()

    # --- trying out -----------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _try(self, call: _Call, args: Any, kwargs: dict[str, Any]) -> None:
        """Find out what the call of a layer makes of its variables; once."""
        layer = call.layer
        variables = list(layer.non_trainable_variables)
        places = [
            place
            for place, variable in enumerate(variables)
            if any(variable is untried for untried in call.untried)
            and tf.as_dtype(variable.dtype) != tf.bool
        ]
        if not layer._call_has_training_arg:
            # A model gives it to every layer; ``__call__`` leaves it out.
            kwargs.pop("training", None)
        elif call.training is not None:
            kwargs.setdefault("training", call.training)
        trained = [variable.value for variable in layer.trainable_variables]
        current = [tf.convert_to_tensor(raw(variable)) for variable in variables]
        for place in places:
            # Where a maximum has been reached, the same rows change nothing any more.
            before = self._own[id(variables[place])].before
            current[place] = tf.convert_to_tensor(before)

        def update(values: Sequence[Any], given: Any) -> list[Any]:
            args, kwargs = given
            _, found = layer.stateless_call(trained, list(values), *args, **kwargs)
            return [tf.convert_to_tensor(value) for value in found]

        def judge(trials: Sequence[Trial]) -> list[bool]:
            states = [self._own[id(variables[place])] for place in places]
            for own, trial in zip(states, trials, strict=True):
                own.kind = own.kind or kind_of(trial)
            return [all(own.kind is not None for own in states)]

        def outputs(given: Any) -> Any:
            args, kwargs = given
            return layer.stateless_call(trained, current, *args, **kwargs)[0]

        self._local.trying = True
        # A layer may not bear to be called so: its state stays unknown.
        with contextlib.suppress(Exception):
            self._trials.look(layer, update, current, places, (args, kwargs), judge)
        with contextlib.suppress(Exception):
            if not _draws(layer):
                self._by_row.look(layer, outputs, (args, kwargs))
        self._local.trying = False
        for place in places:
            self._own[id(variables[place])].tried = self._trials.known(layer)

    # --- with the gradients ---------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def merge(self, variables: Iterable[Any]) -> None:
        """Have those of ``variables`` that the program's own layers set be of all rows.

        Called by all ranks at the same place of a step.
        """
        found = [
            own
            for variable in variables
            if (own := self._own.get(id(variable))) and own.variable() is variable
        ]
        if not found or self._session.size == 1:
            return
        rows = StepRows(self._session)
        known = len(rows.inputs)
        targets = [raw(own.variable()) for own in found]
        values = [tf.convert_to_tensor(target) for target in targets]
        before = [tf.convert_to_tensor(own.before) for own in found]

        changed = tf.stack([tf.convert_to_tensor(own.changed) for own in found])
        tried = [tf.convert_to_tensor(o.tried) for o in found if o.tried is not None]
        count = len(found)

        def run(changed: Array, *arrays: Array) -> list[Array]:
            counted, arrays = arrays[:known], arrays[known:]
            news, olds = arrays[:count], arrays[count : 2 * count]
            if not changed.any():
                return list(news)
            # Without a divided loop all ranks have computed the same: the chief counts.
            alike = rows.in_loop and not self._session.loop.divided
            weight = float(self._session.chief) if alike else rows.of(counted)
            merged = self._merged(found, weight, news, olds, changed)
            # What has been merged, and not set since, is so already.
            return [
                result if its else new
                for result, its, new in zip(merged, changed, news, strict=True)
            ]

        inputs = [changed, *rows.inputs, *values, *before, *tried]
        types = [value.dtype for value in values]
        merged = exchange_in_order(run, inputs, types)
        for own, target, new in zip(
            found, targets, tf.nest.flatten(merged), strict=True
        ):
            target.assign(tf.ensure_shape(new, target.shape))
            own.changed.assign(False)

    def _merged(
        self,
        found: Sequence[OwnState],
        weight: float,
        news: Sequence[Array],
        olds: Sequence[Array],
        changed: Array,
    ) -> list[Array]:
        session = self._session
        names = [name_of(own.variable()) for own in found]
        signature = Signature(
            "state of layers",
            tuple(
                tensor_words(name, new.dtype.name, new.shape)
                for name, new in zip(names, news, strict=True)
            ),
        )
        self._settle(found, names, signature)
        wide = [np.asarray(new, np.float64) for new in news]
        rests = [
            (new - _slope(own) * np.asarray(old, np.float64))
            if weight
            else np.zeros_like(new)
            for own, new, old in zip(found, wide, olds, strict=True)
        ]
        sums: list[Array] = [np.array([weight], np.float64)]
        largest: list[Array] = []
        for own, new, rest in zip(found, wide, rests, strict=True):
            how = own.kind.how if own.kind else "other"
            sums.append(rest * (weight if how in ("mean", "other") else 1.0))
            sign = -1.0 if how == "min" else 1.0
            most = sign * new if weight else np.full_like(new, -np.inf)
            least = -new if weight else np.full_like(new, -np.inf)
            if how == "chief":
                most = new if session.chief else np.full_like(new, -np.inf)
            largest += [most, least]
        weights, *added = reduce_arrays(session.group, sums, ReduceOp.SUM, signature)
        total = float(weights[0])
        extremes = reduce_arrays(session.group, largest, ReduceOp.MAX, signature)
        results = []
        for place, (own, new, old) in enumerate(zip(found, news, olds, strict=True)):
            high, low = extremes[2 * place], -extremes[2 * place + 1]
            result = self._result(own, added[place], total, high, old)
            if changed[place] and (own.kind is None or own.kind.how == "other"):
                same = np.array_equal(high, low)
                moved = not np.array_equal(new, old)
                self._unknown(names[place], own, same=same, changed=moved)
                result = low if same else result
            if np.dtype(new.dtype).kind in "iub":
                result = np.rint(result)
            results.append(result.astype(new.dtype))
        return results

    def _result(
        self, own: OwnState, added: Array, total: float, high: Array, old: Array
    ) -> Array:
        how = own.kind.how if own.kind else "other"
        rest = added
        if how in ("mean", "other"):
            rest = added / total if total else added
        elif how in ("max", "chief"):
            return high
        elif how == "min":
            return -high
        return _slope(own) * np.asarray(old, np.float64) + rest

    def _settle(
        self, found: Sequence[OwnState], names: Sequence[str], signature: Signature
    ) -> None:
        """Agree on the kinds, until all ranks know all of them."""
        if all(own.settled for own in found):
            return
        ours = [None if own.kind is None else asdict(own.kind) for own in found]
        said = [
            json.loads(text)
            for text in allgather_bytes(
                self._session.group, json.dumps(ours).encode(), signature
            )
        ]
        for place, own in enumerate(found):
            kinds = [
                None if rank[place] is None else Kind(**rank[place]) for rank in said
            ]
            own.kind = agreed(kinds)
            own.settled = None not in kinds

    def _unknown(self, name: str, own: OwnState, *, same: bool, changed: bool) -> None:
        """Nobody knows what the ranks' values have to be together."""
        how_to = f"Declare its aggregation where it is created: {_HOW_TO}"
        if same:
            if changed and own.kind is None:
                self._session.warn(
                    f"it is unknown how {name}, which a custom layer sets, depends on "
                    "the rows of a batch. The ranks have different rows but the same "
                    f"value, so it is kept. {how_to}"
                )
            return
        if own.kind is not None and 0.0 < own.kind.slope < 1.0:
            self._session.warn(
                f"{name}, which a custom layer sets, does not follow a mean over rows: "
                "the mean over the ranks is used, which differs from the value on one "
                f"machine. {how_to}"
            )
            return
        self._session.group.refusal = CollectiveError(
            f"{name} is set by a custom layer from the rows of a batch, and differs "
            f"between ranks, which have different rows. {how_to}"
        )
        raise self._session.group.refusal


def _slope(own: OwnState) -> float:
    return own.kind.slope if own.kind and own.kind.how != "chief" else 0.0


def _is_kerass(layer: Any) -> bool:
    return str(type(layer).__module__).partition(".")[0] == "keras"


def _draws(layer: Any) -> bool:
    """Whether random numbers may make its output another one every time."""
    return any(
        "seed_generator" in variable.path for variable in layer.non_trainable_variables
    )

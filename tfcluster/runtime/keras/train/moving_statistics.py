"""Variables that layers update from their data, and how the ranks' values are combined.

They are found by observation: non-trainable variables assigned within a layer's call.
Each rank sees different rows. Keras's own layers keep moving averages, which are
averaged over the ranks together with the gradients. What a layer of the program's own
does is tested in its first step (see ``state_updates``), unless the variable's
``aggregation`` declares it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import (
    ReduceOp,
    Signature,
    tensor_words,
)
from tfcluster.runtime.collective.collectives import allgather_bytes, reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.output_rows import OutputsByRow
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.train.derived_values import ancestry
from tfcluster.runtime.keras.train.state_trials import Trials
from tfcluster.runtime.keras.train.state_updates import Kind, Trial, agreed, kind_of
from tfcluster.runtime.keras.types import Layer, Variable
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
    """A variable that a layer of the program's own updates."""

    variable: weakref.ref[Any]
    before: Any
    """A tf.Variable: the value that all ranks had before their batches."""
    changed: Any
    """A tf.Variable: whether the variable has changed since ``before`` was set."""
    kind: Kind | None = None
    settled: bool = False
    """Whether all ranks know its kind and agree."""
    tried: Any = None
    """A tf.Variable that is written when the kind is determined; in a graph, ops that
    read it run after that."""


@dataclass
class _Call:
    """A layer's call in progress."""

    layer: Layer
    untried: list[Any] = field(default_factory=list)
    training: Any = None


class MovingStatistics:
    """Tracks variables that are assigned while a layer is called."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._averaged: dict[int, weakref.ref[Any]] = {}
        self._own: dict[int, OwnState] = {}
        self._local = threading.local()
        self._trials = Trials()
        self._by_row = OutputsByRow(session)
        self._of_step: list[Any] = []
        """Variables that the current step itself has updated."""

    def install(self) -> None:
        """Track which layer is being called. For synchronous ranks."""
        patches.TABLE.install({patches.LAYER_CALL: self._call})

    def among(self, variables: Iterable[Variable]) -> list[Any]:
        """Those of ``variables`` that Keras's layers update, in the given order."""
        return [
            variable
            for variable in variables
            if (seen := self._averaged.get(id(variable))) and seen() is variable
        ]

    # --- in the call of a layer -----------------------------------------------------

    def assigned(self, variable: Variable, value: Any) -> None:
        """Record that ``variable`` is about to be assigned."""
        if variable.trainable or getattr(self._local, "trying", False):
            return
        if internals.in_stateless_scope():
            return
        context = internals.call_context()
        if context is None:
            if self._session.share is not None:
                self._assigned_in_step(variable, value)
            return
        calls = self._calls()
        if not calls or _is_kerass(calls[-1].layer):
            if tf.as_dtype(variable.dtype).is_floating:
                self._averaged.setdefault(id(variable), weakref.ref(variable))
            return
        if variable.name == internals.SEED_STATE:
            return
        calls[-1].training = internals.training_of(context)
        own = self._state_of(variable)
        if own.kind is None:
            calls[-1].untried.append(variable)
        self._remember(own)

    def _assigned_in_step(self, variable: Variable, value: Any) -> None:
        """Record an assignment by the program's own step, which cannot be tested."""
        if getattr(variable, "synchronization", None) == "on_read":
            return  # A metric's variable: it is reset, and merged when it is read.
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
        """Merge the variables that the step itself has updated over all ranks."""
        chosen, self._of_step = self._of_step, []
        share = self._session.share
        if chosen and share is not None and not share.alone:
            self.merge({id(variable): variable for variable in chosen}.values())

    def _remember(self, own: OwnState) -> None:
        """Save the value common to all ranks, before the first of several changes."""
        value = tf.convert_to_tensor(raw(own.variable()))
        own.before.assign(tf.where(own.changed, own.before, value))
        own.changed.assign(True)

    def _state_of(self, variable: Variable) -> OwnState:
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
        self, original: Callable[..., Any], layer: Layer, *args: Any, **kwargs: Any
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
    def _enter(self, layer: Layer) -> _Call:
        call = _Call(layer)
        self._calls().append(call)
        return call

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _leave(self) -> None:
        self._calls().pop()

    # --- trying out -----------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _try(self, call: _Call, args: Any, kwargs: dict[str, Any]) -> None:
        """Test, until it is known, how a layer's call changes its variables."""
        layer = call.layer
        variables = list(layer.non_trainable_variables)
        places = [
            place
            for place, variable in enumerate(variables)
            if any(variable is untried for untried in call.untried)
            and tf.as_dtype(variable.dtype) != tf.bool
        ]
        if not internals.has_training_argument(layer):
            # A model passes it to every layer; ``__call__`` drops it.
            kwargs.pop("training", None)
        elif call.training is not None:
            kwargs.setdefault("training", call.training)
        trained = [variable.value for variable in layer.trainable_variables]
        current = [tf.convert_to_tensor(raw(variable)) for variable in variables]
        for place in places:
            # Use the old value: once a maximum is reached, the same rows change
            # nothing.
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
        # A layer may not support this kind of call; then its state remains unknown.
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
    def merge(self, variables: Iterable[Variable]) -> None:
        """Merge over all ranks those of ``variables`` that the program's layers update.

        All ranks must call it at the same point of a step.
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
            # In an undivided loop all ranks have computed the same, so only the chief
            # counts.
            alike = rows.in_loop and not self._session.loop.divided
            weight = float(self._session.chief) if alike else rows.of(counted)
            merged = self._merged(found, weight, news, olds, changed)
            # A variable that has not changed since the last merge is merged already.
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
        """Agree on the kinds with the other ranks, until all ranks know all of them."""
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
        """Warn of a variable of unknown kind, or raise if it differs between ranks."""
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
        self._session.refuse(
            f"{name} is set by a custom layer from the rows of a batch, and differs "
            f"between ranks, which have different rows. {how_to}"
        )


def _slope(own: OwnState) -> float:
    return own.kind.slope if own.kind and own.kind.how != "chief" else 0.0


def _is_kerass(layer: Layer) -> bool:
    return str(type(layer).__module__).partition(".")[0] == "keras"


def _draws(layer: Layer) -> bool:
    """Whether random numbers may change the layer's output from call to call."""
    return any(
        "seed_generator" in variable.path for variable in layer.non_trainable_variables
    )

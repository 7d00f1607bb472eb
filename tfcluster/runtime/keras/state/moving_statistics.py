"""Variables that layers update from their data, and how the ranks' values are combined.

These variables are found by observation: they are non-trainable, and assigned within a
layer's call. Each rank sees different rows. Keras's own layers keep moving averages,
which are averaged over the ranks together with the gradients. For a custom layer, the
first step tests how the variable changes (see ``state_updates``), unless the variable's
``aggregation`` declares it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import (
    ReduceOp,
    Signature,
)
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.known_objects import new_flag
from tfcluster.runtime.keras.checks.output_rows import OutputsByRow
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.derived_values import ancestry
from tfcluster.runtime.keras.state.observed_variables import (
    ObservedVariable,
    agree_on_kinds,
)
from tfcluster.runtime.keras.state.state_trials import Trials
from tfcluster.runtime.keras.state.state_updates import Kind, Trial
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.tf_variables import new_variable, raw
from tfcluster.runtime.keras.types import Layer, Variable
from tfcluster.runtime.keras.variable_exchange import exchange_variables
from tfcluster.runtime.tensor_types import Nest, Tensor, TensorLike
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import name_of

_DECLARED = {
    "mean": Kind("mean"),
    "sum": Kind("sum", 1.0),
    "only_first_replica": Kind("chief"),
}

_HOW_TO = (
    "add_weight(..., aggregation='sum') for a sum over rows that is added to it, "
    "'mean' for an average over them, 'only_first_replica' for the chief's"
)


@dataclass(kw_only=True)
class _LayerVariable(ObservedVariable):
    """A variable that a custom layer updates."""

    before: TfVariable
    """The value that all ranks had before their batches."""
    changed: TfVariable
    """Scalar bool: whether the variable has changed since ``before`` was set."""
    tried: TfVariable | None = None
    """Scalar bool that is written when the kind is determined; in a graph, ops that
    read it run after that."""


@dataclass
class _Call:
    """A layer's call in progress."""

    layer: Layer
    untried: list[Variable] = field(default_factory=list)
    """Updated variables whose kind is not known yet."""
    training: bool | Tensor | None = None
    """The argument ``training`` of the outermost layer."""


class MovingStatistics:
    """Tracks variables that are assigned while a layer is called."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._averaged = ObjectMap[bool]()
        """The variables that Keras's own layers update."""
        self._observed = ObjectMap[_LayerVariable]()
        self._local = threading.local()
        self._trials = Trials()
        self._by_row = OutputsByRow(session)
        self._of_step: list[Variable] = []
        """Variables that the current step itself has updated."""

    def install(self) -> None:
        """Track which layer is being called. For synchronous ranks."""
        patches.TABLE.install({patches.LAYER_CALL: self._call})

    def innermost_layer(self) -> Layer | None:
        """The layer that is being called now; None outside of layers."""
        calls = self._calls()
        return calls[-1].layer if calls else None

    def among(self, variables: Iterable[Variable]) -> list[Variable]:
        """The ``variables`` that Keras's layers update, in the given order."""
        return [variable for variable in variables if variable in self._averaged]

    # --- in the call of a layer -----------------------------------------------------

    def assigned(self, variable: Variable, value: TensorLike) -> None:
        """Record that ``variable`` is about to be set to ``value``, of its shape."""
        if variable.trainable or self._trials.trying:
            return
        if internals.in_stateless_scope():
            return
        context = internals.call_context()
        if context is None:
            if self._session.share is not None:
                self._assigned_in_step(variable, value)
            return
        calls = self._calls()
        if not calls or internals.is_of_keras(type(calls[-1].layer)):
            if tf.as_dtype(variable.dtype).is_floating:
                self._averaged[variable] = True
            return
        if variable.name == internals.SEED_STATE:
            return
        calls[-1].training = internals.training_of(context)
        own = self._state_of(variable)
        if own.kind is None:
            calls[-1].untried.append(variable)
        self._remember(own)

    def _assigned_in_step(self, variable: Variable, value: TensorLike) -> None:
        """Record an assignment by the program's own step, which cannot be tested."""
        if getattr(variable, "synchronization", None) == "on_read":
            return  # A metric's variable is reset, and merged when it is read.
        if str(variable.aggregation) in _DECLARED:
            self._remember(self._state_of(variable))
            self._of_step.append(variable)
        elif (
            isinstance(value, tf.Tensor)
            and not tf.executing_eagerly()
            and ancestry(value, {}).sees_data
        ):
            self._session.differs(
                f"a custom step sets {name_of(variable)} from the rows of a batch: "
                "each rank keeps the value from its own rows. Declare its aggregation "
                f"where it is created: {_HOW_TO}"
            )

    def end_of_step(self) -> None:
        """Merge the variables that the step itself has updated over all ranks.

        All ranks must call this at the end of the same step. Raises what ``merge``
        raises.
        """
        chosen, self._of_step = self._of_step, []
        share = self._session.share
        if chosen and share is not None and not share.alone:
            self.merge({id(variable): variable for variable in chosen}.values())

    def _remember(self, own: _LayerVariable) -> None:
        """Save the value that all ranks share, before the first of several changes."""
        variable = own.variable()
        assert variable is not None
        value = tf.convert_to_tensor(raw(variable))
        own.before.assign(tf.where(own.changed, own.before, value))
        own.changed.assign(True)

    def _state_of(self, variable: Variable) -> _LayerVariable:
        def make() -> _LayerVariable:
            with tf.init_scope():
                value = tf.convert_to_tensor(raw(variable))
                before = new_variable(value)
            return _LayerVariable(
                variable=weakref.ref(variable),
                before=before,
                changed=new_flag(),
                kind=_DECLARED.get(str(variable.aggregation)),
            )

        return self._observed.of(variable, make)

    def _calls(self) -> list[_Call]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        found: list[_Call] = self._local.calls
        return found

    def _call(
        self, original: Callable[..., object], layer: Layer, *args: Any, **kwargs: Any
    ) -> object:
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
    def _try(
        self, call: _Call, args: tuple[Nest, ...], kwargs: dict[str, Nest]
    ) -> None:
        """Test how a layer's call changes its variables, until this is known."""
        layer = call.layer
        variables = list(layer.non_trainable_variables)
        places = [
            place
            for place, variable in enumerate(variables)
            if any(variable is untried for untried in call.untried)
            and tf.as_dtype(variable.dtype) != tf.bool
        ]
        if not internals.has_training_argument(layer):
            # A model passes ``training`` to every layer; ``__call__`` drops it.
            kwargs.pop("training", None)
        elif call.training is not None:
            kwargs.setdefault("training", call.training)
        trained = [variable.value for variable in layer.trainable_variables]
        current = [tf.convert_to_tensor(raw(variable)) for variable in variables]
        for place in places:
            # Use the old value: once a maximum is reached, the same rows change
            # nothing.
            before = self._observed[variables[place]].before
            current[place] = tf.convert_to_tensor(before)

        def update(values: Sequence[Tensor], given: Any) -> list[Tensor]:
            args, kwargs = given
            _, new_values = layer.stateless_call(trained, list(values), *args, **kwargs)
            return [tf.convert_to_tensor(value) for value in new_values]

        def judge(trials: Sequence[Trial]) -> list[bool]:
            states = [self._observed[variables[place]] for place in places]
            for own, trial in zip(states, trials, strict=True):
                own.observe(trial)
            return [all(own.kind is not None for own in states)]

        def outputs(given: Any) -> Nest:
            args, kwargs = given
            return layer.stateless_call(trained, current, *args, **kwargs)[0]

        # If the layer does not support this kind of call, its state remains unknown.
        with self._trials.attempt():
            self._trials.look(layer, update, current, places, (args, kwargs), judge)
        with self._trials.attempt():
            if not _may_be_random(layer):
                self._by_row.look(layer, outputs, (args, kwargs))
        for place in places:
            self._observed[variables[place]].tried = self._trials.known(layer)

    # --- with the gradients ---------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def merge(self, variables: Iterable[Variable]) -> None:
        """Merge the ``variables`` that the program's layers update over all ranks.

        All ranks must call this at the same point of a step. Raises CollectiveError on
        all ranks if the values differ and it is unknown how to combine them, and what
        ``exchange_in_order`` and ``Group.exchange`` raise; in a graph, when the op
        runs.
        """
        observed = [
            (variable, own)
            for variable in variables
            if (own := self._observed.get(variable)) is not None
        ]
        if not observed or self._session.size == 1:
            return
        found = [own for _, own in observed]
        rows = StepRows(self._session)
        before = [tf.convert_to_tensor(own.before) for own in found]
        changed = tf.stack([tf.convert_to_tensor(own.changed) for own in found])
        # These are inputs so that a trial of a layer has ended before the exchange.
        tried = [tf.convert_to_tensor(o.tried) for o in found if o.tried is not None]
        count = len(found)

        def merge(
            signature: Signature, news: Sequence[Array], inputs: Sequence[Array]
        ) -> Sequence[Array]:
            changed, olds, rest = inputs[0], inputs[1 : count + 1], inputs[count + 1 :]
            if not changed.any():
                return news
            weight = rows.weight(rest[: len(rows.inputs)])
            merged = self._merged(found, weight, news, olds, changed, signature)
            # A variable that has not changed since the last merge is merged already.
            return [
                result if has_changed else new
                for result, has_changed, new in zip(merged, changed, news, strict=True)
            ]

        exchange_variables(
            "state of layers",
            [variable for variable, _ in observed],
            merge,
            [changed, *before, *rows.inputs, *tried],
        )
        for own in found:
            own.changed.assign(False)

    def _merged(
        self,
        found: Sequence[_LayerVariable],
        weight: float,
        news: Sequence[Array],
        olds: Sequence[Array],
        changed: Array,
        signature: Signature,
    ) -> list[Array]:
        session = self._session
        names = [name_of(own.variable()) for own in found]
        agree_on_kinds(session.group, found, signature)
        wide = [np.asarray(new, np.float64) for new in news]
        # The part of each value that is added to its old value; see
        # ``state_updates.Kind``.
        rests = [
            (new - _slope(own) * np.asarray(old, np.float64))
            if weight
            else np.zeros_like(new)
            for own, new, old in zip(found, wide, olds, strict=True)
        ]
        sums: list[Array] = [np.array([weight], np.float64)]
        max_inputs: list[Array] = []
        for own, new, rest in zip(found, wide, rests, strict=True):
            how = own.how
            sums.append(rest * (weight if how in ("mean", "other") else 1.0))
            sign = -1.0 if how == "min" else 1.0
            most = sign * new if weight else np.full_like(new, -np.inf)
            least = -new if weight else np.full_like(new, -np.inf)
            if how == "chief":
                most = new if session.chief else np.full_like(new, -np.inf)
            max_inputs += [most, least]
        weights, *added = reduce_arrays(session.group, sums, ReduceOp.SUM, signature)
        total = float(weights[0])
        extremes = reduce_arrays(session.group, max_inputs, ReduceOp.MAX, signature)
        results = []
        for place, (own, new, old) in enumerate(zip(found, news, olds, strict=True)):
            high, low = extremes[2 * place], -extremes[2 * place + 1]
            result = self._result(own, added[place], total, high, old)
            if changed[place] and own.how == "other":
                same = np.array_equal(high, low)
                moved = not np.array_equal(new, old)
                self._unknown(names[place], own, same=same, changed=moved)
                result = low if same else result
            if np.dtype(new.dtype).kind in "iub":
                result = np.rint(result)
            results.append(result.astype(new.dtype))
        return results

    def _result(
        self, own: _LayerVariable, added: Array, total: float, high: Array, old: Array
    ) -> Array:
        how = own.how
        rest = added
        if how in ("mean", "other"):
            rest = added / total if total else added
        elif how in ("max", "chief"):
            return high
        elif how == "min":
            return -high
        return _slope(own) * np.asarray(old, np.float64) + rest

    def _unknown(
        self, name: str, own: _LayerVariable, *, same: bool, changed: bool
    ) -> None:
        """Warn about a variable of unknown kind; raise if it differs between ranks."""
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
            self._session.differs(
                f"{name}, which a custom layer sets, does not follow a mean over rows: "
                "the mean over the ranks is used, which differs from the value on one "
                "machine. Compute it from tfc.gather_batch (import tfcluster.runtime "
                "as tfc), which gives the layer the rows of all ranks"
            )
            return
        self._session.refuse(
            f"{name} is set by a custom layer from the rows of a batch, and differs "
            f"between ranks, which have different rows. {how_to}"
        )


def _slope(own: _LayerVariable) -> float:
    return own.kind.slope if own.kind and own.kind.how != "chief" else 0.0


def _may_be_random(layer: Layer) -> bool:
    """Whether random numbers may change the layer's output from call to call."""
    return any(
        internals.SEED_STATE in variable.path
        for variable in layer.non_trainable_variables
    )

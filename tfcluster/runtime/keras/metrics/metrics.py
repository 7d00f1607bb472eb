"""Metrics over all ranks' rows. Their state is merged before a result is computed.

The local state is restored afterwards, so asking twice gives the same result.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.batch_numbers import BatchNumbers
from tfcluster.runtime.keras.metrics.merged_logs import MergedLogs
from tfcluster.runtime.keras.metrics.step_logs import (
    Numbers,
    Recorded,
    StepLogs,
    Value,
    as_number,
    leaves,
    with_leaves,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.metric_state import MetricState
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.keras.types import Logs, Metric, Model
from tfcluster.runtime.tensor_types import Nest, Tensor, TensorLike
from tfcluster.runtime.tensor_types import Variable as TfVariable

_STEP_PATCHES = (patches.ONE_MODEL_TRAIN_STEP, patches.ONE_MODEL_TEST_STEP)
_UNKNOWN = StepLogs(None)
_MARK = "tells_what_it_returns"


class Metrics:
    """The hooks on ``Metric`` and on the models' methods for metrics."""

    def __init__(
        self,
        session: Session,
        state: MetricState,
        layer_state: MovingStatistics,
        numbers: BatchNumbers,
    ) -> None:
        self._session = session
        self._state = state
        self._layer_state = layer_state
        self._numbers = numbers
        self._recorded: ContextVar[Recorded | None] = ContextVar(
            "recorded", default=None
        )
        """The results recorded in the innermost step that is being called."""
        self._steps: weakref.WeakKeyDictionary[Model, dict[str, StepLogs]] = (
            weakref.WeakKeyDictionary()
        )
        self._step = "train_step"
        self._rows: TfVariable | None = None
        """The weight of the last step that was traced or run; see ``StepLogs``."""

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.MEAN_UPDATE: (self._update_state, self._update_mean),
                patches.SUM_UPDATE: (self._update_state, self._update_sum),
                patches.METRIC_UPDATE: self._update_state,
                patches.METRIC_RESULT: self._result,
                patches.MODEL_METRICS_RESULT: self._model_result,
                patches.MODEL_RESULT_OR_LOGS: self._result_or_logs,
            }
        )

    def _update_state(
        self, original: Callable[..., object], metric: Metric, *args: Any, **kwargs: Any
    ) -> object:
        this = f"update of {id(metric)}"
        written = type(metric), internals.function_of(metric)
        own = not all(each is None or internals.is_of_keras(each) for each in written)
        with self._session.once("update_state"):
            # Do nothing again if a class calls the method of its base class.
            if own and not self._session.within(this) and not self._state.trying:
                with self._session.once(this):
                    return self._state.update(original, metric, args, kwargs)
            return original(metric, *args, **kwargs)

    def _update_mean(
        self,
        original: Callable[..., object],
        metric: Metric,
        values: Value,
        sample_weight: TensorLike | None = None,
    ) -> object:
        """Weight a scalar, which stands for a whole batch, by this rank's fraction."""
        fraction = self._fraction_for(metric, values, sample_weight)
        if fraction is None:
            return original(metric, values, sample_weight)
        self._numbers.look(values, _given_to(metric))
        # Once the kind is known, ``weighed`` does this where it is correct.
        known = self._state.known(metric)
        if known is not None:
            one = tf.ones_like(fraction)
            return original(metric, values, tf.where(known, one, fraction))
        kind = self._numbers.kind(metric, values)
        values = tf.cast(values, metric.dtype)
        if kind == "sum":
            values = tf.math.divide_no_nan(values, fraction)
        return original(metric, values, fraction)

    def _update_sum(
        self,
        original: Callable[..., object],
        metric: Metric,
        values: Value,
        sample_weight: TensorLike | None = None,
    ) -> object:
        """Add only a fraction of a scalar that is a mean over the batch."""
        fraction = self._fraction_for(metric, values, sample_weight)
        if fraction is None:
            return original(metric, values, sample_weight)
        self._numbers.look(values, _given_to(metric))
        if self._state.known(metric) is not None:
            return original(metric, values, sample_weight)
        kind = self._numbers.kind(metric, values)
        values = tf.cast(values, metric.dtype)
        if kind == "mean":
            return original(metric, values * fraction)
        return original(metric, tf.where(fraction > 0, values, tf.zeros_like(values)))

    def _fraction_for(
        self, metric: Metric, values: Value, sample_weight: TensorLike | None
    ) -> Tensor | None:
        """This rank's fraction of the batch, if ``values`` stands for a whole batch.

        Returns a scalar of the metric's dtype, or None if ``values`` does not stand for
        a whole batch or if the fraction is unknown.
        """
        if sample_weight is not None or not _is_scalar(values):
            return None
        if self._state.trying or self._state.sees_all_rows:
            return None
        fraction = self._state.fraction()
        return None if fraction is None else tf.cast(fraction, metric.dtype)

    def _result(
        self, original: Callable[..., object], metric: Metric, *args: Any, **kwargs: Any
    ) -> object:
        session = self._session
        if session.within("result"):
            result = original(metric, *args, **kwargs)
        elif self._merges_at_once():
            with session.once("result"), self.merged([metric], metric.name):
                result = _snapshot(original(metric, *args, **kwargs))
        else:
            result = original(metric, *args, **kwargs)
        recorded = self._recorded.get()
        if recorded is not None:
            recorded.add(metric, result)
        return result

    def _merges_at_once(self) -> bool:
        """Whether a result must be merged now, since the program may use it.

        In a graph that would cost an exchange in every step, but the program uses only
        few of the results.
        """
        if not tf.executing_eagerly() or self._session.current_shard is not None:
            return False  # Ranks may have different numbers of shards.
        share = self._session.share
        if share is not None:
            return not share.alone
        return not self._session.inside_keras

    def _model_result(self, original: Callable[[Model], Logs], model: Model) -> Logs:
        session = self._session
        if (
            session.share is not None
            or session.within("result")
            or not tf.executing_eagerly()
        ):
            return original(model)
        with session.once("result"), self.merged(model.metrics, model.name):
            return _snapshot(original(model))

    @property
    def _weight(self) -> float:
        """This rank's weight in the last training or test step."""
        if self._rows is None or not self._session.inside_keras:
            return self._session.last_rows
        return float(self._rows.numpy())

    # --- logs of steps --------------------------------------------------------------

    def watch_steps(self, model: Model) -> None:
        """Record the logs that the steps of this model return."""
        for patch in _STEP_PATCHES:
            name = patch.attribute
            step = getattr(model, name)
            if not hasattr(step, _MARK):
                # A tf.function would keep tensors captured in an earlier trace.
                if hasattr(step, "python_function"):
                    step = tf.autograph.to_graph(step.python_function)
                patches.TABLE.replace(patch, model, self._watched(model, name, step))

    def _watched(
        self, model: Model, name: str, step: Callable[[Nest], Value]
    ) -> Callable[[Nest], Value]:
        reference = weakref.ref(model)

        @functools.wraps(step)
        def watched_step(data: Nest) -> Value:
            share = self._session.share
            if share is None:
                return step(data)
            recorded = Recorded()
            token = self._recorded.set(recorded)
            try:
                logs = step(data)
            finally:
                self._recorded.reset(token)
            self._layer_state.end_of_step()
            if isinstance(logs, Mapping):
                self._note(reference(), name, logs, recorded, share.rows)
            return logs

        setattr(watched_step, _MARK, True)
        return watched_step

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _note(
        self,
        model: Model,
        name: str,
        logs: Mapping[str, Value],
        recorded: Recorded,
        rows: TensorLike,
    ) -> None:
        steps = self._steps.setdefault(model, {})
        if name not in steps:
            steps[name] = StepLogs(new_variable(0.0, tf.float64))
        steps[name].rows.assign(tf.cast(rows, tf.float64))
        steps[name].note(logs, recorded)
        self._judge(steps[name], logs)

    def _judge(self, step: StepLogs, logs: Mapping[str, Value]) -> None:
        """Find sums among a step's numbers; warn if one is neither sum nor mean."""
        for path, value in step.unexplained(logs):
            if not value.dtype.is_floating:
                continue
            kind = self._numbers.kind_of(value)
            if kind == "sum":
                step.sums.add(path)
            elif kind is not None:
                step.sums.discard(path)
            self._numbers.look(value, f"{'/'.join(path)} in the logs of a step")

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def of_shards(
        self, model: Model, found: Sequence[Value], rows: Sequence[TensorLike]
    ) -> Value:
        """The logs of a training step that was called for each shard of this rank.

        ``found`` has the logs that each call returned, and ``rows`` the weights. All
        calls have updated the metrics, so the last call has their results. Other
        numbers are averaged by rows; counts are added up.
        """
        known = self._steps.get(model, {}).get("train_step")
        if known is None or not isinstance(found[-1], Mapping):
            return found[-1]
        weights = [tf.cast(weight, tf.float64) for weight in rows]
        total = tf.add_n(weights)
        known.rows.assign(total)
        each = [dict(leaves(logs)) for logs in found]
        merged = {}
        for path, last in each[-1].items():
            merged[path] = last
            values = [logs.get(path) for logs in each]
            plain = path not in known.origins and path not in known.derived
            if not plain or not all(map(tf.is_tensor, values)):
                continue
            if known.is_added_up(path):
                merged[path] = tf.add_n(values)
            elif last.dtype.is_floating and _is_scalar(last):
                parts = [
                    tf.where(weight > 0, tf.cast(value, tf.float64) * weight, 0.0)
                    for value, weight in zip(values, weights, strict=True)
                ]
                mean = tf.math.divide_no_nan(tf.add_n(parts), total)
                merged[path] = tf.cast(mean, last.dtype)
        combined: Value = with_leaves(found[-1], merged)
        return combined

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Within this context, logs come from ``test_step``."""
        before, self._step = self._step, "test_step"
        try:
            yield
        finally:
            self._step = before

    def _result_or_logs(
        self, original: Callable[[Model, Logs], Logs], model: Model, logs: Logs
    ) -> Logs:
        self._rows = self._steps.get(model, {}).get(self._step, _UNKNOWN).rows
        with self._session.once("result"), self.merged(model.metrics, model.name):
            result = original(model, logs)
            if result is not logs:
                return _snapshot(result)
        if not logs:
            return result
        return self._of_all_ranks(model, logs)

    def of_step(self, model: Model, logs: Mapping[str, Value]) -> Logs:
        """The logs that a step has returned, merged over all ranks.

        All ranks must call this after the same step. Python floats in ``logs`` remain
        Python floats; other values become numpy numbers or arrays. Raises what
        ``Group.exchange`` raises.
        """
        self._rows = self._steps.get(model, {}).get(self._step, _UNKNOWN).rows
        if not logs or _has_own_logs(model, self._step):
            return self._of_all_ranks(model, logs) if logs else {}
        with self._session.once("result"), self.merged(model.metrics, model.name):
            result = _snapshot(model.get_metrics_result())
        return {
            key: _with_type_of(logs.get(key), value) for key, value in result.items()
        }

    def _of_all_ranks(self, model: Model, logs: Mapping[str, Value]) -> Logs:
        known = self._steps.get(model, {}).get(self._step)
        merged = MergedLogs(self._session, self, model, known, logs)
        found: Logs = with_leaves(logs, merged.values())
        return found

    @contextmanager
    def merged(self, metrics: list[Metric], name: str) -> Iterator[None]:
        """Within this context the metrics hold the state of all ranks.

        All ranks must enter the context with the same metrics; ``name`` is for
        messages. Entering raises what ``MetricState.merged`` raises.
        """
        variables = list(
            {id(v): v for metric in metrics for v in metric.variables}.values()
        )
        local = [variable.numpy() for variable in variables]
        what = f"metrics of {name}"
        for variable, value in zip(
            variables,
            self._state.merged(variables, local, what, self._weight),
            strict=True,
        ):
            variable.assign(value)
        try:
            yield
        finally:
            for variable, value in zip(variables, local, strict=True):
                variable.assign(value)


def _given_to(metric: Metric) -> str:
    return f"the number that the metric {metric.name} gets"


def _is_scalar(values: Value) -> bool:
    shape = getattr(values, "shape", None)
    return np.ndim(values) == 0 if shape is None else tuple(shape) == ()


def _snapshot(result: Value) -> Value:
    """A result with variables replaced by their values, which are about to change."""
    values = {
        path: tf.convert_to_tensor(value)
        if isinstance(value, keras.Variable | tf.Variable)
        else value
        for path, value in leaves(result)
    }
    return with_leaves(result, values)


def _has_own_logs(model: Model, step: str) -> bool:
    """Whether the model or its class overrides what its steps return."""
    return not all(
        internals.is_of_keras(getattr(model, name))
        for name in (step, "compute_metrics", "get_metrics_result")
    )


def _with_type_of(old: Value, new: Value) -> Numbers:
    """``new`` as a Python float if ``old`` is one, else as a numpy number."""
    number = as_number(new)
    return float(number) if isinstance(old, float) and np.ndim(number) == 0 else number

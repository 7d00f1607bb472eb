"""Metrics of all ranks' rows: the sums that they keep are summed up before a result.

The local ones are put back afterwards, so that asking twice gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Layout, ReduceOp, tensor_words
from tfcluster.runtime.collective.operations import mean_of_gradients, reduce_arrays
from tfcluster.runtime.collective.transport import Array
from tfcluster.runtime.keras.loops import Loops
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.wrapping import defining_class, wrap


class Metrics:
    """The hooks on ``Metric`` and on what models make of their metrics."""

    def __init__(self, session: Session, loops: Loops) -> None:
        self._session = session
        self._loops = loops

    def install(self) -> None:
        wrap(keras.metrics.Mean, "update_state", self._update_mean)
        for cls in _with_subclasses(keras.metrics.Metric):
            self._hook(cls)
        hook = self._hook

        # Metrics that the program defines later.
        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(keras.metrics.Metric, cls).__init_subclass__(**kwargs)
            hook(cls)

        keras.metrics.Metric.__init_subclass__ = classmethod(init_subclass)
        wrap(
            defining_class(keras.Model, "get_metrics_result"),
            "get_metrics_result",
            self._model_result,
        )
        wrap(
            defining_class(keras.Model, "_get_metrics_result_or_logs"),
            "_get_metrics_result_or_logs",
            self._result_or_logs,
        )

    def _hook(self, cls: type) -> None:
        if "update_state" in vars(cls):
            wrap(cls, "update_state", self._update_state)
        if "result" in vars(cls):
            wrap(cls, "result", self._result)

    def _update_state(
        self, original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._session.once("update_state"):
            return original(metric, *args, **kwargs)

    def _update_mean(
        self,
        original: Callable[..., Any],
        metric: Any,
        values: Any,
        sample_weight: Any = None,
    ) -> Any:
        """One number for a whole batch: that of a part weighs as much as its rows."""
        if sample_weight is None and _is_scalar(values):
            sample_weight = self._fraction()
            if sample_weight is not None:
                sample_weight = tf.cast(sample_weight, metric.dtype)
        return original(metric, values, sample_weight)

    def _fraction(self) -> Any:
        """This rank's part of the rows of the batch; None where it cannot be told."""
        if (share := self._session.share) is None:
            return None if self._session.inside_keras else self._loops.fraction.read()
        if share.total is None:
            return None
        return tf.cast(share.rows, tf.float64) / tf.cast(share.total, tf.float64)

    def _result(
        self, original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any
    ) -> Any:
        session = self._session
        if session.inside_keras or session.within("result"):
            return original(metric, *args, **kwargs)
        if not tf.executing_eagerly():
            return original(metric, *args, **kwargs)
        with session.once("result"), self.merged([metric], metric.name):
            return original(metric, *args, **kwargs)

    def _model_result(self, original: Callable[..., Any], model: Any) -> Any:
        session = self._session
        if (
            session.share is not None
            or session.within("result")
            or not tf.executing_eagerly()
        ):
            return original(model)
        with session.once("result"), self.merged(model.metrics, model.name):
            return original(model)

    def _result_or_logs(
        self, original: Callable[..., Any], model: Any, logs: Any
    ) -> Any:
        with self._session.once("result"), self.merged(model.metrics, model.name):
            result = original(model, logs)
        return self.averaged(result) if result is logs and logs else result

    def of_step(self, model: Any, logs: Mapping[str, Any]) -> dict[str, Any]:
        """The logs that a step has returned, as of all ranks."""
        with self._session.once("result"), self.merged(model.metrics, model.name):
            result = model.get_metrics_result()
        if result.keys() == logs.keys():
            return {key: _number(value) for key, value in result.items()}
        return self.averaged(logs)

    @contextmanager
    def merged(self, metrics: list[Any], name: str) -> Iterator[None]:
        """The metrics hold what all ranks have counted, for a while."""
        variables = list(
            {id(v): v for metric in metrics for v in metric.variables}.values()
        )
        local = [variable.numpy() for variable in variables]
        for variable, value in zip(
            variables, self._sums(variables, local, name), strict=True
        ):
            variable.assign(value)
        try:
            yield
        finally:
            for variable, value in zip(variables, local, strict=True):
                variable.assign(value)

    def _sums(self, variables: list[Any], local: list[Array], name: str) -> list[Array]:
        session = self._session
        ways = [str(variable.aggregation) for variable in variables]
        layout = Layout(
            f"metrics of {name}",
            tuple(
                tensor_words(f"{variable.path} ({way})", value.dtype, value.shape)
                for variable, value, way in zip(variables, local, ways, strict=True)
            ),
        )
        arrays = []
        for value, way in zip(local, ways, strict=True):
            silent = way not in ("sum", "mean") and not session.chief
            array = np.zeros_like(value) if silent else value
            arrays.append(_summable(array))
        sums = reduce_arrays(session.group, arrays, ReduceOp.SUM, layout)
        return [
            (total / session.size if way == "mean" else total).astype(value.dtype)
            for total, value, way in zip(sums, local, ways, strict=True)
        ]

    def averaged(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers that a step has returned, which no metric keeps, by rows of the step.

        What is no number stays this rank's.
        """
        numbers = {key: _number(value) for key, value in logs.items()}
        names = [key for key, number in numbers.items() if number is not None]
        means, _ = mean_of_gradients(
            self._session.group,
            [np.asarray(numbers[key], np.float64) for key in names],
            [],
            weight=self._session.last_rows,
            layout=Layout("logs of the last step", tuple(names)),
        )
        merged = {
            key: mean.astype(numbers[key].dtype)
            for key, mean in zip(names, means, strict=True)
        }
        return {**logs, **merged}


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _is_scalar(values: Any) -> bool:
    shape = getattr(values, "shape", None)
    return np.ndim(values) == 0 if shape is None else tuple(shape) == ()


def _summable(array: Array) -> Array:
    if array.dtype == np.bool_:
        return array.astype(np.int64)
    if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
        return array.astype(np.float32)
    return array


def _number(value: Any) -> Any:
    """A scalar as a numpy one; None for anything else."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    array = np.asarray(value)
    return array[()] if array.ndim == 0 and array.dtype.kind in "fiu" else None

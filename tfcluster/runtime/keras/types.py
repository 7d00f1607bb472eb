"""The types of Keras's objects, as far as the runtime uses them.

mypy does not see into Keras. These protocols list the attributes and methods on which
the runtime relies; private ones are used in ``internals`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from tfcluster.runtime.tensor_types import (
    Array,
    Dataset,
    Gradient,
    Tensor,
    TensorLike,
)
from tfcluster.runtime.tensor_types import Variable as TfVariable

Logs: TypeAlias = dict[str, Any]
"""The logs of a step or an epoch: numbers by name, or nested dictionaries."""

Config: TypeAlias = dict[str, Any]
"""The result of ``get_config``: values that JSON can represent, by argument."""


class KerasVariable(Protocol):
    """A ``keras.Variable`` or a ``tf.Variable``."""

    _path: str
    name: str
    dtype: Any
    """A string for Keras's variables, a ``tf.DType`` for TensorFlow's."""

    shape: Any
    """A tuple for Keras's variables, a ``tf.TensorShape`` for TensorFlow's."""

    constraint: Callable[[Tensor], Tensor] | None
    overwrite_with_gradient: bool
    """Only Keras variables have this attribute."""

    def assign(self, value: TensorLike) -> Any: ...

    def assign_add(self, value: TensorLike) -> Any: ...

    def numpy(self) -> Array: ...


class Optimizer(Protocol):
    """A ``keras.optimizers.Optimizer``."""

    name: str
    built: bool
    iterations: KerasVariable
    learning_rate: Any
    loss_scale_factor: float | None
    clipnorm: float | None
    global_clipnorm: float | None
    weight_decay: float | None
    use_ema: bool
    gradient_accumulation_steps: int | None
    momentum: float
    """Only SGD and RMSprop have this attribute."""
    _trainable_variables: Sequence[KerasVariable]
    _iterations: KerasVariable
    _learning_rate: Any
    variables: Sequence[KerasVariable]

    def build(self, variables: Sequence[KerasVariable]) -> None: ...

    def exclude_from_weight_decay(self, var_list: Sequence[KerasVariable]) -> None: ...

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> KerasVariable:
        """Returns ``iterations``."""

    def get_config(self) -> Config: ...

    @classmethod
    def from_config(cls, config: Config) -> Any: ...

    def _check_variables_are_known(
        self, variables: Sequence[KerasVariable]
    ) -> None: ...

    def _get_variable_index(self, variable: KerasVariable) -> int: ...

    def _clip_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]: ...

    def _use_weight_decay(self, variable: KerasVariable | TfVariable) -> bool: ...


class Layer(Protocol):
    """A ``keras.Layer``."""

    name: str
    built: bool
    variables: Sequence[KerasVariable]
    weights: Sequence[KerasVariable]
    trainable_variables: Sequence[KerasVariable]

    def _flatten_layers(
        self, include_self: bool = True, recursive: bool = True
    ) -> Iterator[Layer]: ...


class BatchNormalization(Layer, Protocol):
    """A ``keras.layers.BatchNormalization``."""

    _reduction_axes: Sequence[int]

    def _moments(
        self, inputs: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


class Metric(Protocol):
    """A ``keras.metrics.Metric``."""

    variables: Sequence[KerasVariable]


class Model(Layer, Protocol):
    """A ``keras.Model``."""

    optimizer: Any
    """An ``Optimizer``, or None before ``compile``."""
    compiled: bool
    jit_compile: bool
    run_eagerly: bool
    train_function: object | None
    test_function: object | None
    predict_function: Callable[[Any], Any] | None
    _initial_epoch: int | None
    metrics: list[Metric]

    def _flatten_metrics_in_order(self, logs: Logs) -> list[float] | float: ...

    def make_predict_function(self) -> None: ...


class Callback(Protocol):
    """A ``keras.callbacks.Callback``."""

    model: Model


class CallbackList(Protocol):
    """A ``keras.callbacks.CallbackList``."""


class ModelCheckpoint(Callback, Protocol):
    """A ``keras.callbacks.ModelCheckpoint``."""

    def _save_model(self, epoch: int, batch: int | None, logs: Logs | None) -> None: ...


class SwapEMAWeights(Callback, Protocol):
    """A ``keras.callbacks.SwapEMAWeights``."""

    _ema_weights_in_model: bool


class DataAdapter(Protocol):
    """A source of batches for ``fit``, of one kind of data."""

    num_batches: int | None
    """Batches per epoch; None if unknown."""


class EpochIterator(Protocol):
    """The iterator from which ``fit`` gets its batches."""

    data_adapter: DataAdapter
    steps_per_epoch: int | None
    steps_per_execution: int
    _distributed_dataset: Dataset

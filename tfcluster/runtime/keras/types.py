"""The types of Keras's objects, as far as the runtime uses them.

mypy does not see into Keras. These protocols list the attributes and methods on which
the runtime relies; private ones are used in ``internals`` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol


class Variable(Protocol):
    """A ``keras.Variable`` or a ``tf.Variable``."""

    _path: str

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...

    @property
    def path(self) -> str: ...

    @property
    def value(self) -> Any: ...

    @property
    def aggregation(self) -> Any: ...

    @property
    def trainable(self) -> bool: ...

    def assign(self, value: Any) -> Any: ...

    def numpy(self) -> Any: ...


class Optimizer(Protocol):
    """A ``keras.optimizers.Optimizer``."""

    name: str
    built: bool
    iterations: Any
    learning_rate: Any
    loss_scale_factor: float | None
    clipnorm: float | None
    global_clipnorm: float | None
    weight_decay: float | None
    use_ema: bool
    gradient_accumulation_steps: int | None
    momentum: Any
    """Of SGD and RMSprop."""
    _trainable_variables: Sequence[Any]
    _iterations: Any
    _learning_rate: Any
    _exclude_from_weight_decay: set[str]
    _exclude_from_weight_decay_cache: dict[str, bool]
    _exclude_from_weight_decay_pattern: Any

    @property
    def variables(self) -> Sequence[Any]: ...

    def build(self, variables: Sequence[Any]) -> None: ...

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any: ...

    def _check_variables_are_known(self, variables: Sequence[Any]) -> None: ...

    def _get_variable_index(self, variable: Any) -> int: ...

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]: ...

    def _use_weight_decay(self, variable: Any) -> bool: ...

    def _var_key(self, variable: Any) -> str: ...


class Layer(Protocol):
    """A ``keras.Layer``."""

    name: str
    built: bool
    _call_has_training_arg: bool

    @property
    def variables(self) -> Sequence[Any]: ...

    @property
    def trainable_variables(self) -> Sequence[Any]: ...

    @property
    def non_trainable_variables(self) -> Sequence[Any]: ...

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def losses(self) -> Sequence[Any]: ...

    def _flatten_layers(
        self, include_self: bool = True, recursive: bool = True
    ) -> Iterator[Layer]: ...

    def _get_own_losses(self) -> Sequence[Any]: ...

    def _get_regularization_losses(self) -> Sequence[Any]: ...


class BatchNormalization(Layer, Protocol):
    """A ``keras.layers.BatchNormalization``."""

    synchronized: bool
    _reduction_axes: Sequence[int]

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]: ...


class Metric(Protocol):
    """A ``keras.metrics.Metric``."""

    name: str

    @property
    def variables(self) -> Sequence[Any]: ...

    def update_state(self, *args: Any, **kwargs: Any) -> Any: ...

    def stateless_update_state(self, *args: Any, **kwargs: Any) -> Any: ...

    def reset_state(self) -> None: ...

    def result(self) -> Any: ...


class Model(Layer, Protocol):
    """A ``keras.Model``."""

    optimizer: Any
    compiled: bool
    jit_compile: bool
    stop_training: bool
    distribute_strategy: Any
    train_function: Any
    _initial_epoch: int | None

    @property
    def metrics(self) -> list[Any]: ...

    def get_metrics_result(self) -> dict[str, Any]: ...

    def _flatten_metrics_in_order(self, logs: Mapping[str, Any]) -> Any: ...

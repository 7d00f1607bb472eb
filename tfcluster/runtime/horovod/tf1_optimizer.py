"""TensorFlow 1 optimizers whose gradients are combined over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.horovod.settings import Settings
from tfcluster.runtime.tensor_types import Gradient, Variable
from tfcluster.runtime.tf1_types import V1Optimizer as WrappedOptimizer

contract.check(tf_internals.NAMES_OF_OPTIMIZER_1, optional=False)

_DELEGATED = (
    "apply_gradients",
    "get_slot",
    "get_slot_names",
    "variables",
    *(name.name for name in tf_internals.NAMES_OF_OPTIMIZER_1),
)


class HorovodV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # untyped
    """Wraps an optimizer: combines its gradients and delegates everything else."""

    def __init__(
        self, optimizer: WrappedOptimizer, settings: Settings, *, use_locking: bool
    ) -> None:
        super().__init__(name=settings.label, use_locking=use_locking)
        self._optimizer = optimizer
        self._settings = settings
        self.register_local_var = settings.local.add

    @unconverted
    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient, Variable]]:
        """The wrapped optimizer's gradients, combined over ranks; None stays None."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        gradients = self._settings.exchanged([g for g, _ in pairs], variables)
        return list(zip(gradients, variables, strict=True))


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: HorovodV1Optimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in _DELEGATED:
    setattr(HorovodV1Optimizer, _name, _delegate(_name))

"""Changes in memory, so that tests of 2023 run with Keras 3, NumPy 2 and tfcluster.

Each docstring says what has changed, or what the tests take from inside Horovod.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import TestCase

import keras
import numpy as np
import tensorflow as tf
from packaging.version import Version
from tensorflow.python.client.session import register_session_run_conversion_functions

from tfcluster import runtime
from tfcluster.runtime.errors import CollectiveMismatchError
from tfcluster.runtime.horovod.settings import Settings

ERRORS = {
    tf.errors.FailedPreconditionError: (CollectiveMismatchError,),
    tf.errors.InvalidArgumentError: (CollectiveMismatchError, ValueError),
}
"""What tfcluster raises where Horovod's kernels raise errors of TensorFlow."""


def install() -> None:
    """Apply all of them, in this process."""
    for adapt in (
        inner_modules,
        errors,
        half_precision,
        optimizers,
        gradients_of_optimizers,
        layers_and_models,
        variables,
    ):
        adapt()


def inner_modules() -> None:
    """Modules of Horovod that are no API, from which the tests import small helpers."""
    rank, size = runtime.rank(), runtime.size()

    def in_thread(
        target: Callable[..., object], args: Sequence[object] = (), **_: object
    ) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    eager = SimpleNamespace(_executing_eagerly=tf.executing_eagerly)
    known: dict[str, dict[str, object]] = {
        "horovod.tensorflow": {"util": eager, **vars(eager)},
        "horovod.tensorflow.util": vars(eager),
        "horovod.tensorflow.mpi_ops": {
            "_basics": SimpleNamespace(
                _get_process_set_ids_and_ranks=runtime.get_process_set_ids_and_ranks
            )
        },
        "horovod.common.util": {
            "_cache": functools.cache,
            "extension_available": lambda name: name == "tensorflow",
            "is_version_greater_equal_than": lambda a, b: Version(a) >= Version(b),
        },
        "horovod.runner": {},
        "horovod.runner.common": {},
        "horovod.runner.common.util": {},
        "horovod.runner.common.util.env": {
            "get_env_rank_and_size": lambda: (rank, size)
        },
        "horovod.runner.util": {},
        "horovod.runner.util.threads": {"in_thread": in_thread},
    }
    for name, attributes in known.items():
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            found = sys.modules[name] = ModuleType(name)
            found.__path__ = []
        vars(found).update(attributes)


def errors() -> None:
    """tfcluster finds wrong arguments itself, and raises errors of its own."""
    original = TestCase.assertRaises

    def raises(test: TestCase, expected: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = expected if isinstance(expected, tuple) else (expected,)
        others = [other for kind in kinds for other in ERRORS.get(kind, ())]
        return original(test, (*kinds, *others), *args, **kwargs)

    tf.test.TestCase.assertRaises = raises


def half_precision() -> None:
    """NumPy 2 compares a float16 with a Python number in float16, where 1e-8 is 0."""
    original = TestCase.assertLess

    def less(test: TestCase, a: Any, b: Any, msg: Any = None) -> None:
        original(test, float(a) if isinstance(a, np.float16) else a, b, msg)

    tf.test.TestCase.assertLess = less


def optimizers() -> None:
    """Keras 3 renamed ``lr``; it has one kind of optimizer, and one of their bases.

    The base class demands a learning rate, and passes it on to ``update_step``.
    """
    kind = keras.optimizers.Optimizer
    original = kind.__init__

    def create(self: Any, *args: Any, lr: Any = None, **kwargs: Any) -> None:
        if not args:
            kwargs["learning_rate"] = lr or kwargs.get("learning_rate", 0.1)
        original(self, *args, **kwargs)

    def subclassed(cls: Any, /, **_: object) -> None:
        step = vars(cls).get("update_step")
        if step is not None and step.__code__.co_argcount == 3:
            cls.update_step = lambda self, g, v, _rate: step(self, g, v)

    kind.__init__ = create
    kind.__init_subclass__ = classmethod(subclassed)
    kind.lr = property(lambda self: self.learning_rate)
    tf.keras.optimizers.legacy = keras.optimizers


def gradients_of_optimizers() -> None:
    """Keras 3 applies gradients only, it does not compute them.

    Horovod averages them in ``_compute_gradients``, tfcluster in ``apply``.
    """
    kind = keras.optimizers.Optimizer
    original = kind.apply_gradients

    def compute(self: Any, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        if callable(loss):
            with tf.GradientTape() as tape:
                loss = loss()
        gradients = tape.gradient(loss, var_list)
        settings: Settings = vars(self)["_tfcluster_settings"]
        if settings.passes == 1:
            # Tests read these averages, and apply none of them.
            gradients = settings.exchanged(gradients, var_list)
        return list(zip(gradients, var_list, strict=True))

    def apply(
        self: Any, pairs: Any, experimental_aggregate_gradients: bool = True
    ) -> Any:
        return original(self, pairs)

    def aggregation(self: Any) -> Any:
        return SimpleNamespace(counter=vars(self)["_tfcluster_accumulation"]._count)

    kind._compute_gradients = compute
    kind.apply_gradients = apply
    kind._agg_helper = property(aggregation)


def layers_and_models() -> None:
    """Arguments that Keras 3 removed, and which changed no result."""
    _without(keras.layers.BatchNormalization, "__init__", "fused")
    _without(keras.Model, "compile", "experimental_run_tf_function")
    mean_squared_error = keras.losses.mean_squared_error
    tf.keras.losses.mean_squared_error = mean_squared_error


def variables() -> None:
    """A variable of Keras 3 holds one of TensorFlow; tests need its key and value."""
    keras.Variable.ref = lambda self: self.value.ref()
    register_session_run_conversion_functions(
        keras.Variable,
        fetch_function=lambda each: ([each.value], lambda found: found[0]),
    )


def _without(kind: Any, method: str, argument: str) -> None:
    original = getattr(kind, method)

    # Keras also calls both by keywords, and reads from this signature what they take.
    def call(self: Any, **kwargs: Any) -> Any:
        kwargs.pop(argument, None)
        return original(self, **kwargs)

    setattr(kind, method, call)

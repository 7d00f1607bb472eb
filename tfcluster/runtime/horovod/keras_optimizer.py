"""Turns a Keras optimizer into a distributed optimizer.

The hook is on the instance, not on its class. So its class, its config and its saved
form remain Keras's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfcluster.runtime import contract
from tfcluster.runtime.horovod.settings import Settings
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import KerasVariable, Model, Optimizer
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensor_types import Variable as TfVariable

AnOptimizer = TypeVar("AnOptimizer", bound=Optimizer)

_SETTINGS = "_tfcluster_settings"
_ACCUMULATION = "_tfcluster_accumulation"


def distribute(optimizer: AnOptimizer, settings: Settings) -> AnOptimizer:
    """Make ``optimizer`` exchange gradients before it applies them, and return it.

    Replaces the settings of an optimizer that is already distributed.
    """
    patches.TABLE.install({patches.MODEL_COMPILE: _compile}, always=True)
    contract.mark(optimizer, _SETTINGS, settings)
    vars(optimizer).pop(_ACCUMULATION, None)
    apply, add = MethodType(_apply, optimizer), settings.local.add
    patches.TABLE.replace(patches.ONE_OPTIMIZER_APPLY, optimizer, apply)
    patches.TABLE.replace(patches.ONE_OPTIMIZER_LOCAL, optimizer, add)
    return optimizer


def is_distributed(optimizer: Optimizer | None) -> bool:
    """Whether ``distribute`` has modified this optimizer."""
    return _SETTINGS in getattr(optimizer, "__dict__", {})


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _apply(
    optimizer: Optimizer,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[KerasVariable] | None = None,
) -> None:
    """Call ``Optimizer.apply`` after an exchange."""
    grads = list(grads)
    settings: Settings = vars(optimizer)[_SETTINGS]
    apply = functools.partial(type(optimizer).apply, optimizer)
    if not grads:
        apply(grads, trainable_variables)
        return
    variables = _built(optimizer, trainable_variables, len(grads))

    def exchange(gradients: list[Gradient]) -> None:
        apply(settings.exchanged(gradients, variables), trainable_variables)

    def count() -> None:
        internals.iterations_of(optimizer).assign_add(1)

    if settings.passes == 1:
        exchange(grads)
    else:
        _accumulation(optimizer, settings).add(grads, exchange, count)


def _built(
    optimizer: Optimizer,
    trainable_variables: Sequence[KerasVariable] | None,
    count: int,
) -> list[Any]:
    """The variables of the gradients. Builds the optimizer if necessary."""
    if trainable_variables is None:
        # Use no names if the original method has to report what is missing.
        variables = internals.trained_variables(optimizer) if optimizer.built else []
        return variables if len(variables) == count else list(range(count))
    variables = list(trainable_variables)
    if not optimizer.built:
        name = keras.name_scope(optimizer.name, caller=optimizer)
        with tf.init_scope(), name:
            optimizer.build(variables)
        optimizer.built = True
    return variables


def _accumulation(optimizer: Optimizer, settings: Settings) -> Accumulation:
    accumulation: Accumulation | None = vars(optimizer).get(_ACCUMULATION)
    if accumulation is None:
        accumulation = Accumulation(settings.passes, average=settings.average_passes)
        contract.mark(optimizer, _ACCUMULATION, accumulation)
    return accumulation


def _compile(
    original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
) -> Any:
    result = original(model, *args, **kwargs)
    _adapt(model)
    return result


def _adapt(model: Model) -> None:
    """Correct what Keras has set up for a model with a distributed optimizer."""
    outer = getattr(model, "optimizer", None)
    inner = getattr(outer, "inner_optimizer", None)
    if outer is not None and is_distributed(inner):
        # The outer optimizer checks for infinities first, and ranks might disagree.
        settings = vars(inner).pop(_SETTINGS)
        patches.TABLE.restore(patches.ONE_OPTIMIZER_APPLY, inner)
        patches.TABLE.restore(patches.ONE_OPTIMIZER_LOCAL, inner)
        distribute(outer, settings)
    if is_distributed(outer):
        without_xla(model)


# --- accumulation ---------------------------------------------------------------------


class Accumulation:
    """Sums the gradients of ``passes`` calls of ``add``, or averages them.

    This is ``backward_passes_per_step`` of Horovod
    (horovod/tensorflow/gradient_aggregation.py).
    """

    def __init__(self, passes: int, *, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._sums: list[TfVariable | None] | None = None
        self._count: TfVariable | None = None

    def add(
        self,
        gradients: Sequence[Gradient],
        apply: Callable[[list[Gradient]], object],
        count_pass: Callable[[], object],
    ) -> None:
        """Add one pass's gradients; on every ``passes``-th call, ``apply`` the sums.

        On other calls, ``count_pass``: a schedule of Horovod's scripts counts passes.
        A None stays None. IndexedSlices become tensors. All shapes must be known.
        Raises ValueError if a variable has a gradient in some passes but not in others.
        """
        dense = [
            None if gradient is None else tf.convert_to_tensor(gradient)
            for gradient in gradients
        ]
        sums, count = self._prepared(dense)
        for total, gradient in zip(sums, dense, strict=True):
            if total is not None and gradient is not None:
                total.assign_add(gradient)
        count.assign_add(1)

        def finish() -> bool:
            factor = 1 / self._passes if self._average else 1
            apply(
                [
                    None if total is None else total * tf.constant(factor, total.dtype)
                    for total in sums
                ]
            )
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            count.assign(0)
            return True

        def go_on() -> bool:
            count_pass()
            return False

        if tf.executing_eagerly():
            (finish if int(count) >= self._passes else go_on)()
        else:
            full = tf.greater_equal(count.read_value(), self._passes)
            tf.cond(full, finish, go_on)

    def _prepared(
        self, dense: Sequence[Tensor | None]
    ) -> tuple[list[TfVariable | None], TfVariable]:
        """The sums and the number of passes; both are created in the first pass."""
        if self._sums is None or self._count is None:
            with tf.init_scope():
                self._sums = [
                    None
                    if gradient is None
                    else tf.Variable(
                        tf.zeros(gradient.shape, gradient.dtype), trainable=False
                    )
                    for gradient in dense
                ]
                self._count = tf.Variable(0, trainable=False, dtype=tf.int32)
        present = [total is not None for total in self._sums]
        if present != [gradient is not None for gradient in dense]:
            raise ValueError(
                "backward_passes_per_step: a variable has a gradient in some passes "
                "and none in others"
            )
        return self._sums, self._count

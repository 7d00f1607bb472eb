"""Finds loops in a step that may run once for each row of a batch.

A random op with a state draws its first number in the first iteration of such a loop.
On one machine that number belongs to the first row of the batch, and on each rank to
its own first row. Iterations run at the same time, so even one machine may draw in
another order: the numbers of a rank's rows are not known. A loop over anything else,
such as time steps, has equally many iterations on all ranks, and its draws are the same
as on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras.random.drawn_rows import IN_ROW_LOOP, DrawnRows
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.tensor_types import Nest, Tensor


class RowLoops:
    """The hooks on TensorFlow's loops, including the loops that AutoGraph creates."""

    def __init__(self, session: Session, rows: DrawnRows) -> None:
        self._session = session
        self._rows = rows

    def install(self) -> None:
        """Install the hooks in TensorFlow, once per process."""
        tf_patches.TABLE.install(
            {
                tf_patches.WHILE_LOOP: self._while,
                tf_patches.VECTORIZED_LOOP: self._vectorized,
            }
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _while(
        self,
        original: Callable[..., Nest],
        cond: Callable[..., Any],
        body: Callable[..., Any],
        loop_vars: Sequence[Any],
        *args: Any,
        **settings: Any,
    ) -> Nest:
        if not self._rows.divides():
            return original(cond, body, loop_vars, *args, **settings)
        most = settings.get("maximum_iterations")
        limits = [] if most is None else [_number(most)]

        # TensorFlow traces the condition before the body.
        def observed_condition(*values: Any) -> Any:
            found = cond(*values)
            limits.extend(_limits(found, values, loop_vars))
            return found

        def observed_body(*values: Any) -> Any:
            if not any(map(self._rows.may_be_rows, limits)):
                return body(*values)
            with self._session.once(IN_ROW_LOOP):
                return body(*values)

        return original(observed_condition, observed_body, loop_vars, *args, **settings)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _vectorized(
        self,
        original: Callable[..., Nest],
        loop_fn: Callable[..., Any],
        iters: Tensor | int,
        *args: Any,
        **settings: Any,
    ) -> Nest:
        if not (self._rows.divides() and self._rows.may_be_rows(_number(iters))):
            return original(loop_fn, iters, *args, **settings)
        with self._session.once(IN_ROW_LOOP):
            return original(loop_fn, iters, *args, **settings)


def _limits(
    condition: Any, values: Sequence[Any], initial: Sequence[Any]
) -> Iterator[int | None]:
    """The integers on which the condition of a loop depends; None if not known.

    ``values`` are the loop's variables in the graph of the condition, and ``initial``
    are the variables before the loop. Yields nothing for a loop that runs eagerly.
    """
    if not tf.is_tensor(condition) or tf.executing_eagerly():
        return
    outer = {id(inner): outer for outer, inner in condition.graph.captures}
    variables = zip(tf.nest.flatten(values), tf.nest.flatten(initial), strict=False)
    # A value that is not an integer may depend on the rows until the loop ends.
    outer |= {
        id(value): start if value.dtype.is_integer else value
        for value, start in variables
        if tf.is_tensor(value)
    }
    seen, waiting = set(), [condition]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in outer or not tensor.op.inputs:
            leaf = outer.get(id(tensor), tensor)
            static = tf.get_static_value(leaf) if tf.is_tensor(leaf) else leaf
            is_variable = tensor.dtype == tf.resource
            if not is_variable and (static is None or _is_integer(static)):
                yield None if static is None else int(static)
        else:
            waiting.extend(tensor.op.inputs)


def _number(given: Tensor | int) -> int | None:
    """An integer if it is known while the loop is traced."""
    found = tf.get_static_value(given) if tf.is_tensor(given) else given
    return None if found is None else int(found)


def _is_integer(value: Any) -> bool:
    found = np.asarray(value)
    return found.ndim == 0 and np.issubdtype(found.dtype, np.integer)

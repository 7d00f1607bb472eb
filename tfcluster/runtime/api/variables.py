"""Make variables equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfcluster.runtime.api.moving import broadcast_tensors
from tfcluster.runtime.api.ops import unconverted


@unconverted
def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Set variables of TensorFlow or Keras to the values of rank ``root_rank``.

    All in one exchange; order, names, shapes and dtypes are the same on all ranks. In a
    graph of TensorFlow 1 it returns the op that does it. Raises what ``broadcast``
    raises.
    """
    chosen = list(variables)
    values = broadcast_tensors(
        [tf.convert_to_tensor(variable) for variable in chosen],
        root_rank,
        "broadcast of variables",
        [name_of(variable) for variable in chosen],
    )
    assigned = [
        variable.assign(value) for variable, value in zip(chosen, values, strict=True)
    ]
    in_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    return tf.group(*assigned) if in_graph else None


def broadcast_global_variables(root_rank: int) -> Any:
    """``broadcast_variables`` of all global variables of a graph of TensorFlow 1."""
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def name_of(variable: Any) -> str:
    """A variable's path (Keras), else its name (TensorFlow)."""
    return str(getattr(variable, "path", None) or variable.name)

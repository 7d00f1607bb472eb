"""Makes variables equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tfcluster.runtime.exchange.gather_broadcast import broadcast_tensors
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tensors import name_of


@unconverted
def broadcast_variables(
    variables: Iterable[tf.Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Set TensorFlow or Keras variables to the values of rank ``root_rank``.

    They are sent in one exchange. Order, names, shapes and dtypes must be the same on
    all ranks; ``allreduce`` lists the supported dtypes. Returns None, or in a
    TensorFlow 1 graph the op that assigns the variables. ``inplace`` is an argument of
    Horovod's function and has no effect. Raises what ``broadcast`` raises. Follows
    ``broadcast_variables`` of horovod/tensorflow/functions.py.
    """
    chosen = list(variables)
    values = broadcast_tensors(
        [tf.convert_to_tensor(variable) for variable in chosen],
        root_rank,
        "broadcast of variables",
        [name_of(variable) for variable in chosen],
        process_set,
    )
    assigned = [
        variable.assign(value) for variable, value in zip(chosen, values, strict=True)
    ]
    in_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    return tf.group(*assigned) if in_graph else None


def broadcast_(
    variables: Iterable[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Variable | Tensor]:
    """Like ``broadcast_variables``, but returns the variables.

    In a TensorFlow 1 graph it returns tensors with the new values instead, which have
    the variables' shapes and dtypes. ``name`` has no effect. Raises what ``broadcast``
    raises. Follows ``broadcast_`` of horovod/tensorflow/mpi_ops.py.
    """
    chosen = list(variables)
    done = broadcast_variables(chosen, root_rank, process_set)
    if done is None:
        return chosen
    with tf.control_dependencies([done]):
        return [tf.identity(variable.read_value()) for variable in chosen]


def broadcast_global_variables(root_rank: int) -> tf.Operation | None:
    """Call ``broadcast_variables`` for all global variables of a TensorFlow 1 graph.

    Returns the op that assigns them. Raises RuntimeError in TensorFlow 2, which keeps
    no list of all variables, and what ``broadcast`` raises. Follows
    ``broadcast_global_variables`` of horovod/tensorflow/__init__.py.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "broadcast_global_variables is for TensorFlow 1 graphs: with eager "
            "execution, no list of all variables exists. Call "
            "broadcast_variables(model.variables, root_rank), and the same for "
            "optimizer.variables"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)

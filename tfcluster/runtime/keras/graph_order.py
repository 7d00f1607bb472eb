"""Keep the exchanges of a graph in the order in which the program has written them.

TensorFlow runs two stateful ops of a graph in a fixed order only where both touch the
same resource, or neither touches any. A conditional or a loop touches the variables
that its branches use, so an exchange inside of it had no fixed place among the others,
and ranks could begin different ones. Therefore each exchange reads one variable before
it begins, and writes that variable when it has ended: TensorFlow then orders them, and
everything that contains them, on all ranks alike.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from tfcluster.runtime.collective import CollectiveError


def exchange_in_order(
    run: Callable[..., Any], inputs: Sequence[Any], types: Any
) -> Any:
    """``tf.numpy_function`` for a ``run`` that communicates with the other ranks."""
    if tf.executing_eagerly():
        return tf.numpy_function(run, inputs, types)
    refuse_xla()
    order = _variable()
    with tf.control_dependencies([order.read_value()]):
        outputs = tf.numpy_function(run, inputs, types)
    with tf.control_dependencies(tf.nest.flatten(outputs)):
        order.assign(False, read_value=False)
    return outputs


_refused = threading.local()
"""The exception that arrives may be another one: AutoGraph makes new ones."""


def refuse_xla() -> None:
    """Raise CollectiveError while XLA is to compile what is traced."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    ):
        _refused.lately = True
        raise CollectiveError("XLA cannot compile an exchange of gradients")


def take_refusal() -> bool:
    """Whether ``refuse_xla`` has raised since the last call of this."""
    lately = getattr(_refused, "lately", False)
    _refused.lately = False
    return lately


@functools.cache
def _variable() -> tf.Variable:
    """One for the process: functions that call each other share it."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(False, trainable=False, name="exchange_order")

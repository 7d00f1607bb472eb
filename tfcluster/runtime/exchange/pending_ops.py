"""TensorFlow 1 graph ops that wait for other ranks.

A session has few threads, and an op that calls Python occupies a thread while it waits.
With as many exchanges in flight as there are threads, the session would hang. So the
call becomes the only element of a dataset, which TensorFlow computes on a thread that
belongs to the op.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.exchange.negotiation import Negotiator
from tfcluster.runtime.process_group import group, is_initialized
from tfcluster.runtime.process_sets import ProcessSet
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tf1 import patches

Act = Callable[..., Sequence[Array]]
"""An exchange: a function of arrays."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_made: WeakKeyDictionary[tf.Graph, Counter[str]] = WeakKeyDictionary()
_functions: WeakKeyDictionary[
    tf.Graph, list[tf.types.experimental.ConcreteFunction]
] = WeakKeyDictionary()
_orders: WeakKeyDictionary[Group, Negotiator] = WeakKeyDictionary()


def waiting_op(
    act: Act,
    tensors: Sequence[Tensor],
    dtypes: Sequence[tf.DType],
    what: str,
    among: ProcessSet,
) -> list[Tensor]:
    """The results of ``act``, which is called once all ranks have reached this op.

    ``what`` may contain a name, as in ``allreduce of NAME``. Ranks match named ops by
    name, in whatever order they create them, and unnamed ops by the order of creation.
    ``act`` gets the values of ``tensors``. ``dtypes`` are the dtypes of its results,
    whose shapes are unknown. When the op runs, it raises what ``Negotiator.run``
    raises.
    """
    _see_runs()
    key = _key(what)

    def run(*arrays: Array) -> list[Array]:
        arrays_out = order_among(among.group()).run(key, lambda: act(*arrays))
        return [np.asarray(array) for array in arrays_out]

    # An element has at least one component, and an exchange may have no tensors.
    values = [tf.zeros([], tf.bool), *tensors]
    unknown = tf.TensorShape(None)

    @tf.function(  # type: ignore[untyped-decorator]
        input_signature=[tf.TensorSpec(None, value.dtype) for value in values],
        autograph=False,
    )
    def computed(nothing: Tensor, *own: Tensor) -> list[Tensor]:
        return list(tf.numpy_function(run, list(own), list(dtypes)))

    # Not tf.data.Dataset.map: its function runs on the session's threads.
    dataset = tf.raw_ops.MapDataset(
        input_dataset=tf.raw_ops.TensorDataset(
            components=values, output_shapes=[value.shape for value in values]
        ),
        other_arguments=[],
        f=_in_this_graph(computed),
        output_types=list(dtypes),
        output_shapes=[unknown] * len(dtypes),
        use_inter_op_parallelism=False,
    )
    return list(
        tf.raw_ops.DatasetToSingleElement(
            dataset=dataset,
            output_types=list(dtypes),
            output_shapes=[unknown] * len(dtypes),
            name=_op_name(what),
        )
    )


def order_among(ranks: Group) -> Negotiator:
    """The group's coordinator, which orders its exchanges; created on first use."""
    order = _orders.get(ranks)
    if order is None:
        order = _orders.setdefault(ranks, Negotiator(ranks))
    return order


def _key(what: str) -> str:
    graph = tf.compat.v1.get_default_graph()
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        graph = outer  # Several functions of a graph may run at the same time.
    used = _made.setdefault(graph, Counter())
    name = what.partition(" of ")[2]
    used[name] += 1
    if not name:
        return f"{what} (number {used[name]} without a name)"
    return name if used[name] == 1 else f"{name} (number {used[name]} of this name)"


def _in_this_graph(
    function: tf.types.experimental.PolymorphicFunction,
) -> tf.types.experimental.ConcreteFunction:
    """The function as an op's attribute; adds the function to the graph's library."""
    concrete = function.get_concrete_function()
    graph = tf.compat.v1.get_default_graph()
    concrete.add_to_graph(graph)
    # Keep the Python functions that it calls alive as long as the graph exists.
    _functions.setdefault(graph, []).append(concrete)
    return concrete


def _op_name(what: str) -> str:
    """The op's name, which TensorFlow's own messages show."""
    return re.sub(r"[^A-Za-z0-9_.\\-]+", "_", what).strip("_.-\\") or "exchange"


@functools.cache
def _see_runs() -> None:
    """Patch Session.run: report runs to the negotiation, and raise our own errors."""
    handlers = {patches.SESSION_RUN: _run, patches.INTERACTIVE_RUN: _run}
    patches.TABLE.install(handlers, HandlerPlace.SERVICE, always=True)


def _run(original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    if not is_initialized():
        return original(*args, **kwargs)
    with ExitStack() as runs:
        runs.enter_context(translated())
        for order in (order_among(group()), *_orders.values()):
            runs.enter_context(order.running())
        return original(*args, **kwargs)

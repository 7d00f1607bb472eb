"""TensorFlow 1 graph ops that wait for other ranks, in an order on which these agree.

A TensorFlow 1 graph runs its ops in any order. Each thread records which exchange it
has reached. The ranks compare these lists and run the exchanges that all of them have
reached, in the order of rank 0's list. Horovod's coordinator does the same
(``horovod/common/controller.cc``).

A session has few threads, and an op that calls Python occupies a thread while it waits.
With as many exchanges in flight as there are threads, the session would hang. So the
call becomes the only element of a dataset, which TensorFlow computes on a thread that
belongs to the op.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.contract import Place
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.process_group import group, is_initialized
from tfcluster.runtime.process_sets import ProcessSet
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tf1 import patches

_T = TypeVar("_T")

DEADLINE_S = 60.0
"""Seconds without a common exchange after which the ranks give up."""
_PAUSE_S = 0.002


@dataclass(eq=False, slots=True)
class _PendingOp:
    """A thread's request for one exchange, and its outcome."""

    key: str
    act: Callable[[], object]
    done: bool = False
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Run the exchange and keep its result or error."""
        try:
            self.result = self.act()
        except BaseException as error:
            self.error = error


class Coordinator:
    """Keeps this rank's pending requests. One thread negotiates at a time."""

    def __init__(
        self,
        group: Group,
        *,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self._clock = clock
        self._changed = threading.Condition()
        self._pending: list[_PendingOp] = []
        self._negotiating = False
        self._stuck_since: float | None = None
        self._runs = 0
        self._broken: CollectiveError | None = None
        """The reason why the graph runs in progress cannot continue."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark that a run of the graph is in progress.

        If the ranks disagree on one exchange of a run, all other exchanges of that run
        fail too, because some ranks may never reach them. The next run starts afresh.
        """
        with self._changed:
            if not self._runs:
                self._broken = None
            self._runs += 1
        try:
            yield
        finally:
            with self._changed:
                self._runs -= 1

    def run(self, key: str, act: Callable[[], _T]) -> _T:
        """Call ``act`` once all ranks have reached ``key``, and return its result.

        ``act`` exchanges through the group. Raises what ``act`` raises, and
        CollectiveTimeoutError on every rank if for ``deadline_s`` there was no exchange
        that all of them had reached.
        """
        if self._group.size == 1:
            return act()
        op = _PendingOp(key, act)
        with self._changed:
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            self._pending.append(op)
            self._changed.notify_all()
        try:
            while (known := self._next_negotiation(op)) is not None:
                self._negotiate(known)
        finally:
            with self._changed:
                if op in self._pending:
                    self._pending.remove(op)
        if op.error is not None:
            raise op.error
        result: _T = op.result
        return result

    def _next_negotiation(self, op: _PendingOp) -> list[_PendingOp] | None:
        """Wait for our turn; return requests to negotiate, or None if ours is done."""
        with self._changed:
            self._changed.wait_for(lambda: op.done or not self._negotiating)
            if op.done:
                return None
            self._negotiating = True
            return list(self._pending)

    def _negotiate(self, known: list[_PendingOp]) -> None:
        """Compare lists with the other ranks; run exchanges that all have reached."""
        progressed = False
        try:
            common = self._common([op.key for op in known])
            for key in common:
                self._complete(
                    next(op for op in known if op.key == key and not op.done)
                )
                if self._broken is not None:
                    break  # All ranks stop: they have all got the same error.
            progressed = bool(common)
        finally:
            with self._changed:
                if not progressed:
                    # Another thread of this rank may reach the exchange for which the
                    # other ranks wait.
                    self._changed.wait_for(
                        lambda: len(self._pending) > len(known), _PAUSE_S
                    )
                self._negotiating = False
                self._changed.notify_all()

    def _complete(self, op: _PendingOp) -> None:
        op.run()
        with self._changed:
            op.done = True
            self._pending.remove(op)
            if isinstance(op.error, CollectiveMismatchError):
                self._break(op.error)
            self._changed.notify_all()

    def _break(self, error: CollectiveError) -> None:
        self._broken = error
        for op in self._pending:
            op.done, op.error = True, type(error)(str(error))
        self._pending.clear()

    def _common(self, keys: Sequence[str]) -> list[str]:
        """The exchanges that all ranks have reached. Rank 0 decides on a timeout."""
        now = self._clock()
        if self._stuck_since is None:
            self._stuck_since = now
        late = now - self._stuck_since > self._deadline_s
        with self._group.exchange(Signature("which operation is next")) as call:
            sent = json.dumps([late, list(dict.fromkeys(keys))]).encode()
            received = [json.loads(data) for data in call.transport.allgather(sent)]
            lists = [[str(key) for key in theirs] for _, theirs in received]
            common = [key for key in lists[0] if all(key in keys for keys in lists)]
            if not common and received[0][0]:
                raise CollectiveTimeoutError(_disagreement(lists, self._deadline_s))
        if common:
            self._stuck_since = None
        return common


def _disagreement(lists: Sequence[Sequence[str]], deadline_s: float) -> str:
    at = "; ".join(f"rank {rank}: {', '.join(keys)}" for rank, keys in enumerate(lists))
    return (
        f"for {deadline_s:g} s the ranks have been waiting in different operations: "
        f"{at}. Every rank must run the same exchanges: they are matched by name or, "
        "without names, by their order of creation in the graph"
    )


Act = Callable[..., Sequence[Array]]
"""An exchange: a function of arrays."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_made: WeakKeyDictionary[tf.Graph, Counter[str]] = WeakKeyDictionary()
_functions: WeakKeyDictionary[
    tf.Graph, list[tf.types.experimental.ConcreteFunction]
] = WeakKeyDictionary()
_orders: WeakKeyDictionary[Group, Coordinator] = WeakKeyDictionary()


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
    whose shapes are unknown. When the op runs, it raises what ``Coordinator.run``
    raises.
    """
    _see_runs()
    key = _key(what)

    def run(*arrays: Array) -> list[Array]:
        found = order_among(among.group()).run(key, lambda: act(*arrays))
        return [np.asarray(array) for array in found]

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


def order_among(ranks: Group) -> Coordinator:
    """The group's coordinator, which orders its exchanges; created on first use."""
    found = _orders.get(ranks)
    if found is None:
        found = _orders.setdefault(ranks, Coordinator(ranks))
    return found


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
    patches.TABLE.install(handlers, Place.SERVICE, always=True)


def _run(original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    if not is_initialized():
        return original(*args, **kwargs)
    with ExitStack() as runs:
        runs.enter_context(translated())
        for order in (order_among(group()), *_orders.values()):
            runs.enter_context(order.running())
        return original(*args, **kwargs)

"""Acts before and after steps whose exchanges are ops of their graph.

None of our Python code runs in such a step. So each call of a ``tf.function`` that
contains exchanges is recorded in the group while it runs, so that late and lost ranks
are noticed. When the function ends, TensorFlow's errors are translated, the steps that
it has run are counted, and checks compare the ranks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    Signature,
)
from tfcluster.runtime.collective.group import GraphProgress
from tfcluster.runtime.collective.transports.tensorflow import graph
from tfcluster.runtime.collective.transports.tensorflow.failures import (
    is_of_exchange,
    reason_of,
)
from tfcluster.runtime.collective.transports.tensorflow.graph import GraphCollectives
from tfcluster.runtime.collective.transports.tensorflow.transport import (
    TensorFlowTransport,
)
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tf_internals import Function

_LOOKS_PER_TIMEOUT, _LONGEST_SLEEP_S = 10, 1.0
_OF_LAYERS = "all_reduce"
"""The key of the place for the layers' exchanges."""


@dataclass(eq=False)
class Place:
    """A place in graphs that each step passes once, with an action of the runtime."""

    signature: Callable[[], Signature]
    """The exchange of this place; called when a step has run."""
    after: Callable[[int], None]
    """Called after a graph has run, with the number of times it has passed here."""
    exchanges: bool
    explain: Callable[[], None]
    """Called if the ranks differ here but their signatures do not: raises the error."""
    in_loop: bool = False
    """Whether the place is in a step of a loop of the program."""
    passed: Any = field(default_factory=graph.counter)
    """The counter of how often all graphs have passed here."""
    seen: int = 0
    """The number of passes for which ``after`` has been called."""
    unlike: Any = field(default_factory=graph.counter)
    """The counter of how often the ranks have differed here."""
    seen_unlike: int = 0

    def is_unlike(self) -> bool:
        """Whether the ranks have differed since the last call."""
        before, self.seen_unlike = self.seen_unlike, int(self.unlike.numpy())
        return self.seen_unlike > before

    def forget(self) -> None:
        """Do not call ``after`` for the passes so far."""
        self.seen = int(self.passed.numpy())

    def new(self) -> int:
        """The number of passes since ``after`` was called."""
        return int(self.passed.numpy()) - self.seen


@dataclass(eq=False)
class _Call:
    """A call of a function by the program, eagerly."""

    places: list[Place]
    """The places in its graphs."""
    begun: bool = False
    counts: tuple[tuple[int, int], ...] = ()
    """The value of ``GraphCollectives.counts`` when the call began."""
    timed_out: bool = False


class GraphSteps:
    """The exchanges in graphs of this process, over ``transport``.

    An op that waits for longer than ``stall_timeout_s`` seconds fails. ``clock`` is the
    clock of ``group``, and returns seconds.
    """

    def __init__(
        self,
        group: Group,
        transport: TensorFlowTransport,
        *,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._transport = transport
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._collectives: GraphCollectives | None = None
        self._objects: Any = None
        self._places: dict[Hashable, Place] = {}
        self._kept: dict[Hashable, Any] = {}
        self._of_functions: weakref.WeakKeyDictionary[Function, list[Place]] = (
            weakref.WeakKeyDictionary()
        )
        self._sites: weakref.WeakKeyDictionary[Any, dict[Hashable, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._local = threading.local()
        self._running: _Call | None = None
        self._lock = threading.Lock()
        self._last: tuple[object, float] | None = None
        """The last progress that was seen, and the time when it was first seen."""

    def install(self) -> None:
        """Install the hook on calls of functions, and start to look for late ranks."""
        tf_patches.TABLE.install({tf_patches.FUNCTION_CALL: self._call})
        threading.Thread(
            target=self._watch, daemon=True, name="tfcluster-graph-watch"
        ).start()

    @property
    def uses_ops(self) -> bool:
        """Whether the transport has any ops; see ``TensorFlowTransport.uses_ops``."""
        return self._transport.uses_ops

    @property
    def collectives(self) -> GraphCollectives:
        """The ops. The first call is an exchange of all ranks.

        Raises what ``Group.exchange`` raises.
        """
        if self._collectives is None:
            signature = Signature("devices of the ranks")
            with tf.init_scope(), self._group.exchange(signature):
                groups = self._transport.groups
                self._collectives = GraphCollectives(groups, self._group.rank)
        return self._collectives

    @property
    def objects(self) -> Any:
        """A variable of dtype int64: whether this rank objects; see ``Group``.

        It is set when a function is called. If this rank objects while the function is
        traced or runs, the other ranks learn about it in their next exchange.
        """
        if self._objects is None:
            self._objects = graph.counter()
        return self._objects

    def place(
        self,
        key: Hashable,
        signature: Callable[[], Signature],
        after: Callable[[int], None],
        *,
        exchanges: bool = True,
        in_loop: bool = False,
        explain: Callable[[], None] = lambda: None,
    ) -> Place:
        """The place of this key in the graph that is being traced.

        The graph has to increment ``Place.passed`` each time it passes. ``exchanges``
        says whether the ranks exchange something there. ``in_loop`` says that the place
        is in a step of a loop of the program, and that its exchange begins no earlier
        than the backward pass. If there are several traces, the ``signature``,
        ``after`` and ``explain`` of the last one are used.
        """
        place = self._places.get(key)
        if place is None:
            place = Place(signature, after, exchanges, explain, in_loop)
            self._places[key] = place
        place.signature, place.after, place.explain = signature, after, explain
        call: _Call | None = getattr(self._local, "call", None)
        if call is not None and place not in call.places:
            call.places.append(place)
            self._begin(call)
        return place

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        """Sum the ranks' tensors with an op of the graph that is being traced.

        ``tensor`` has a static shape, which is equal on all ranks, and dtype float32,
        float64, int32 or int64; so has the result. ``what`` names it on all ranks.
        """
        place = self.place(_OF_LAYERS, lambda: Signature(what), lambda steps: None)
        with tf.name_scope(graph.SCOPE):
            words = (what, *tensor.shape, tensor.dtype.name)
            words = (*words, self.occurrence(words))
            total = self.collectives.forward.all_reduce(tensor, words, tensor)
            with tf.control_dependencies([total]):
                graph.increment(place.passed)
        return total

    def is_called(self) -> bool:
        """Whether this thread is in a function that the program has called eagerly.

        Only in that case are the graph's errors translated, and its steps counted.
        """
        return getattr(self._local, "call", None) is not None

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The first result of ``make`` for this key: all traces share it."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def occurrence(self, words: Hashable) -> int:
        """How often the graph that is being traced has asked for ``words`` before.

        So two exchanges of a graph have different keys, which are equal on all ranks.
        """
        counts = self._sites.setdefault(tf.compat.v1.get_default_graph(), {})
        counts[words] = counts.get(words, -1) + 1
        return counts[words]

    # --- in the thread that calls the function ----------------------------------------

    def _call(
        self,
        original: Callable[..., object],
        function: Function,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        if not tf.executing_eagerly() or getattr(self._local, "call", None):
            return original(function, *args, **kwargs)
        call = _Call(self._of_functions.get(function, []))
        self._local.call = call
        try:
            if call.places:
                self._begin(call)
            try:
                result = original(function, *args, **kwargs)
            except Exception as error:
                if call.begun:
                    self._failed(call, error)
                raise
            if call.begun:
                self._succeeded(call)
            return result
        finally:
            self._local.call = self._running = None
            if call.begun:
                self._group.end_graph(0)
                self._of_functions[function] = call.places

    def _begin(self, call: _Call) -> None:
        if call.begun:
            return
        places = [place for place in call.places if place.exchanges]
        of_layers = self._places.get(_OF_LAYERS)
        if len(places) > 1:  # The gradients' names say more.
            places = [place for place in places if place is not of_layers]
        whats = dict.fromkeys(place.signature().what for place in places)
        if self._group.objection:
            with tf.init_scope():
                self.objects.assign(1)
        with self._lock:
            self._last = None
        with tf.init_scope():  # The function may be being traced.
            call.counts = self._counts()
        self._group.begin_graph(" and ".join(whats), self._progress)
        call.begun = True
        self._running = call

    def _succeeded(self, call: _Call) -> None:
        news = [(place, place.new()) for place in call.places]
        self._running = None
        self._group.end_graph(_exchanges(news))
        for place, new in news:
            if new:
                place.seen += new
                place.after(new)

    def _failed(self, call: _Call, error: Exception) -> None:
        """Translate an error of the function; return if the program should get it.

        Raises CollectiveError if an exchange has failed.
        """
        if not isinstance(error, tf.errors.OpError):
            return  # The function has not been traced.
        group, text = self._group, error.message
        places = [place for place in call.places if place.exchanges]
        ended = _exchanges([(place, place.new()) for place in call.places])
        if (
            isinstance(error, tf.errors.OutOfRangeError)
            and not self._progress().waiting
        ):
            self._succeeded(call)  # The data has ended between two steps.
            return
        if self._counts() == call.counts and all(p.in_loop for p in places):
            # The program's own error, before any exchange: the program may catch it.
            group.end_graph(0)
            return
        for place in call.places:
            if place.is_unlike():
                # All ranks fail here. Some ranks may have passed other places before
                # the graph ended, so the counts of those places would differ.
                for each in call.places:
                    each.forget()
                group.end_graph(0)
                self._compare(place)
        if call.timed_out:
            waited = f"rank {group.rank} has waited {self._stall_timeout_s:.0f} s"
            late = CollectiveTimeoutError(f"a rank did not respond in time: {waited}")
            raise group.graph_failed(late, ended) from error
        if group.error_in(text) is not None:
            return
        found = self._transport.error_of(error)
        if isinstance(found, CollectiveTimeoutError):  # Another rank has given up.
            found = PeerLostError(str(found))
        if is_of_exchange(text, found, graph.SCOPE):
            raise group.graph_failed(found, ended) from error
        group.graph_aborted(error, reason_of(text), ended)

    def _compare(self, place: Place) -> None:
        """Raise the CollectiveError that says how the ranks differ."""
        signature = place.signature()
        if self._group.objection:
            self.objects.assign(0)
        with self._group.exchange(signature):
            pass
        place.explain()
        raise CollectiveMismatchError(
            f"{signature.what}: the ranks exchange different tensors"
        )

    # --- for other threads ------------------------------------------------------------

    def _progress(self) -> GraphProgress:
        call, counts = self._running, self._counts()
        ended = 0
        if call is not None:
            ended = _exchanges([(place, place.new()) for place in [*call.places]])
        with self._lock:
            if self._last is None or self._last[0] != (counts, ended):
                self._last = (counts, ended), self._clock()
            since = self._last[1]
        return GraphProgress(ended, any(begun > end for begun, end in counts), since)

    def _counts(self) -> tuple[tuple[int, int], ...]:
        return () if self._collectives is None else self._collectives.counts()

    def _watch(self) -> None:
        """Abort the ops when this rank has waited for too long."""
        sleep_s = min(self._stall_timeout_s / _LOOKS_PER_TIMEOUT, _LONGEST_SLEEP_S)
        never = threading.Event()
        while not never.wait(sleep_s):
            call = self._running
            if call is None or call.timed_out or not self._is_late():
                continue
            self._group.stall_report()
            if self._is_late() and self._running is call:
                call.timed_out = True
                self._transport.wait_no_longer(self._stall_timeout_s)

    def _is_late(self) -> bool:
        progress = self._progress()
        waited_s = self._clock() - progress.since
        return progress.waiting and waited_s > self._stall_timeout_s


def _exchanges(news: list[tuple[Place, int]]) -> int:
    return sum(new for place, new in news if place.exchanges)

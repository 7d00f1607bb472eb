"""Round-robin sharding by batches: rank r of N gets batches r, r+N, r+2N, ...

For ranks that do not wait for each other. All ranks read the data in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.data.loop_datasets import on_demand, serves_a_loop
from tfcluster.runtime.keras.session import Session


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Which batches belong to one rank."""

    rank: int
    size: int

    def count(self, batches: int) -> int:
        """How many of ``batches`` batches belong to this rank."""
        return max(0, -(-(batches - self.rank) // self.size))

    def takes(self, number: int) -> bool:
        """Whether batch ``number``, counted from 0, belongs to this rank."""
        return number % self.size == self.rank

    def stand_in(self, batches: int) -> ShardSpec:
        """The spec of another rank, for a rank that gets none of so few batches."""
        return ShardSpec(self.rank % batches, batches)


class FitBatches:
    """Shards the batches of ``fit``."""

    def __init__(
        self, session: Session, hand: ShardSpec, set_idle: Callable[[bool], None]
    ) -> None:
        self._session = session
        self._hand = hand
        self._set_idle = set_idle

    def install(self) -> None:
        patches.TABLE.install({patches.EPOCH_ITERATOR: self._begin})

    @contextmanager
    def next_is_dealt(self) -> Iterator[None]:
        """Shard the next iterator that this thread creates: the training data's."""
        with self._session.once("dealing"):
            try:
                yield
            finally:
                self._set_idle(False)

    def _begin(
        self, original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(iterator, *args, **kwargs)
        if not self._session.take("dealing"):
            return
        if not self._session.divides or getattr(iterator, "_tfcluster_dealt", False):
            return
        hand, few = self._hand, _fewest(iterator)
        if few and hand.count(few) == 0:
            hand = hand.stand_in(few)
            self._set_idle(True)
        _deal(iterator, hand)


def _fewest(iterator: Any) -> int | None:
    """The number of batches per epoch, or None if unknown."""
    found = iterator.steps_per_epoch or iterator.data_adapter.num_batches
    return int(found) if found else None


def _deal(iterator: Any, hand: ShardSpec) -> None:
    dealt = internals.dataset_of(iterator).shard(hand.size, hand.rank)
    internals.set_dataset(iterator, dealt)
    if iterator.steps_per_epoch:
        iterator.steps_per_epoch = hand.count(iterator.steps_per_epoch)
    reset = iterator.reset

    def count() -> None:
        whole = iterator.data_adapter.num_batches
        internals.set_batches(iterator, hand.count(whole) if whole else whole)

    def reset_and_count() -> None:
        reset()
        count()

    patches.TABLE.replace(patches.ONE_EPOCH_ITERATOR_RESET, iterator, reset_and_count)
    count()


class LoopBatches:
    """Shards the batches of custom loops over a ``tf.data.Dataset``.

    A dataset is used for training once a gradient has been applied between two of its
    batches. Its first batch goes to every rank, in later passes to one rank only.
    """

    def __init__(self, session: Session, hand: ShardSpec) -> None:
        self._session = session
        self._hand = hand
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        patches.TABLE.install({patches.DATASET_ITER: self._iter})

    def _iter(self, original: Callable[..., Any], dataset: Any) -> Any:
        session = self._session
        if not session.divides or not serves_a_loop(session, dataset):
            return original(dataset)
        return original(_dealt(dataset, self._passage(dataset)))

    def _passage(self, dataset: Any) -> Callable[[Any], Any]:
        session, hand = self._session, self._hand
        applies: list[int] = []

        def takes(number: Any) -> Any:
            if applies and session.loop.applies > applies[0]:
                self._trained.add(dataset)
            applies[:] = [session.loop.applies]
            trains = dataset in self._trained
            session.loop.divided = trains
            return np.bool_(not trains or hand.takes(int(number)))

        return takes


def _dealt(dataset: Any, takes: Callable[[Any], Any]) -> Any:
    """The batches of ``dataset`` that ``takes`` accepts; it is asked in their order."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def is_taken(number: Any, *element: Any) -> Any:
        taken = tf.numpy_function(takes, [number], tf.bool)
        taken.set_shape([])
        return taken

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def without_number(number: Any, element: Any) -> Any:
        return element

    return on_demand(dataset.enumerate().filter(is_taken).map(without_number))

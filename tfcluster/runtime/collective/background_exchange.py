"""Averages gradients in a separate thread while other gradients are being computed.

The program hands over each bucket when it is computed. Then it waits for the means,
bucket by bucket: it can use the first means while the others are being exchanged. The
thread ends with the exchange: with its result, with its error, or when the program does
something else instead of handing over the remaining gradients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from tfcluster.runtime.collective.buckets import Bucket, Item
from tfcluster.runtime.collective.collectives import Check
from tfcluster.runtime.collective.gradient_mean import MeanOptions, Means, mean_of
from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.errors import CollectiveError


class Arrivals:
    """``Gradients`` that one thread hands over and another waits for."""

    def __init__(self, items: Sequence[Item], late: int) -> None:
        self.items = items
        self.count = len(items)
        self.late = late
        self._changed = threading.Condition()
        self._dense: dict[int, Array] = {}
        self._sparse: Sequence[Slices] | None = None
        self._given_up = False

    def hand_over(self, bucket: Sequence[int], arrays: Sequence[Array]) -> None:
        """Hand over dense arrays, with their positions in the list."""
        with self._changed:
            self._dense.update(zip(bucket, arrays, strict=True))
            self._changed.notify_all()

    def complete(self, late: Sequence[Array], sparse: Sequence[Slices]) -> None:
        """Hand over the last dense arrays and the sparse gradients."""
        first = self.count - self.late
        with self._changed:
            self._dense.update(enumerate(late, first))
            self._sparse = sparse
            self._changed.notify_all()

    def give_up(self) -> None:
        """End the wait for missing gradients with an error, if any are missing."""
        with self._changed:
            self._given_up = self._sparse is None
            self._changed.notify_all()

    def has(self, bucket: Bucket) -> bool:
        """Whether these dense arrays have been handed over."""
        return all(place in self._dense for place in bucket)

    def dense(self, bucket: Bucket) -> list[Array]:
        """These dense arrays; waits for them. Call it once per bucket."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self.has(bucket))
            self._require()
            # Not kept, so that TensorFlow can reuse their memory once they are sent.
            return [self._dense.pop(place) for place in bucket]

    def sparse(self) -> Sequence[Slices]:
        """The sparse gradients; waits for them."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._sparse is not None)
            self._require()
            assert self._sparse is not None
            return self._sparse

    def _require(self) -> None:
        if self._given_up:
            raise CollectiveError(
                "the step ended before all of its gradients were computed, and the "
                "program continued"
            )


class _Results:
    """A ``Receiver`` from which another thread takes what has arrived."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._notes: tuple[bytes, ...] | None = None
        self._averaged: dict[Bucket, Sequence[Array]] = {}
        self._ended = False

    def began(self, notes: tuple[bytes, ...]) -> None:
        with self._changed:
            self._notes = notes
            self._changed.notify_all()

    def averaged(self, bucket: Bucket, means: Sequence[Array]) -> None:
        with self._changed:
            self._averaged[bucket] = means
            self._changed.notify_all()

    def end(self) -> None:
        """Record that no other results will arrive."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def notes(self) -> tuple[bytes, ...] | None:
        """All ranks' notes, once the exchange has begun; None if it failed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._notes is not None)
            return self._notes

    def means(self, bucket: Bucket) -> Sequence[Array] | None:
        """The means of a bucket; waits for them. None if the exchange ended first."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or bucket in self._averaged)
            return self._averaged.get(bucket)


class BackgroundExchange:
    """Runs ``gradient_mean.mean_of`` in a thread. A group has only one at a time."""

    def __init__(
        self,
        group: Group,
        items: Sequence[Item],
        late: int,
        options: MeanOptions,
        weight: float,
        signature: Signature,
        check: Check | None = None,
    ) -> None:
        """Begin the exchange. Raises CollectiveError if another has not ended."""
        if (other := group.background) is not None:
            other.give_up()
        self._group = group
        self._arrivals = Arrivals(items, late)
        self._results = _Results()
        self._means: Means | None = None
        self._error: BaseException | None = None
        self._waited_s = group.waited_s
        self._blocked_s = 0.0

        def run() -> None:
            try:
                self._means = mean_of(
                    group,
                    self._arrivals,
                    options,
                    weight,
                    signature,
                    check,
                    self._results,
                )
            except BaseException as error:
                self._error = error
            finally:
                if group.background is self:
                    group.background = None
                self._results.end()

        self._thread = threading.Thread(
            target=run, daemon=True, name="tfcluster-exchange"
        )
        group.background = self
        self._thread.start()

    def hand_over(self, bucket: Bucket, arrays: Sequence[Array]) -> None:
        """Hand over the arrays of a bucket of ``MeanOptions.buckets``; does not wait.

        The arrays must not change afterwards. Raises the error if the exchange failed.
        """
        if self._error is not None:
            raise self._error
        self._arrivals.hand_over(bucket, arrays)

    def notes(self) -> tuple[bytes, ...]:
        """The notes of all ranks. Raises the error if the exchange could not begin."""
        with self._blocked():
            notes = self._results.notes()
        if notes is None:
            self._fail()
        return notes

    def means(self, bucket: Bucket) -> Sequence[Array]:
        """The means of a bucket between hosts; waits. Raises what ``mean_of`` raises.

        Every bucket must have been handed over before.
        """
        with self._blocked():
            means = self._results.means(bucket)
        if means is None:
            self._fail()
        return means

    def result(self, late: Sequence[Array], sparse: Sequence[Slices]) -> Means:
        """Hand over the last arrays and wait for the means.

        Raises what ``mean_of`` raises.
        """
        self._arrivals.complete(late, sparse)
        with self._blocked():
            self._thread.join()
        waited_s = self._group.waited_s - self._waited_s
        self._group.hide_wait(max(0.0, waited_s - self._blocked_s))
        if self._means is None:
            self._fail()
        return self._means

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        """A context in which the program waits for the exchange."""
        began = time.monotonic()
        yield
        self._blocked_s += time.monotonic() - began

    def _fail(self) -> NoReturn:
        self._thread.join()
        assert self._error is not None
        raise self._error

    def give_up(self) -> None:
        """See ``group.Background``."""
        if threading.current_thread() is not self._thread:
            self._arrivals.give_up()

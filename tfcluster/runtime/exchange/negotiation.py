"""Negotiates a common order of exchanges that ranks reach in different orders.

A TensorFlow 1 graph runs its ops in any order. Each thread records which exchange it
has reached. The ranks compare these lists and run the exchanges that all of them have
reached, in the order of rank 0's list. Horovod's coordinator does the same
(``horovod/common/controller.cc``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)

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


class Negotiator:
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
            while (pending := self._next_negotiation(op)) is not None:
                self._negotiate(pending)
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

    def _negotiate(self, pending: list[_PendingOp]) -> None:
        """Compare lists with the other ranks; run exchanges that all have reached."""
        progressed = False
        try:
            common = self._common([op.key for op in pending])
            for key in common:
                self._complete(
                    next(op for op in pending if op.key == key and not op.done)
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
                        lambda: len(self._pending) > len(pending), _PAUSE_S
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

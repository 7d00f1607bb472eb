"""Negotiate a common order of exchanges that ranks reach in different orders.

A TensorFlow 1 graph runs its ops in any order. Each thread records which exchange it
has reached. The ranks compare these lists and run the exchanges that all of them have
reached, in the order of rank 0's list. Horovod's coordinator does the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)

DEADLINE_S = 60.0
_PAUSE_S = 0.002


@dataclass(eq=False, slots=True)
class _PendingOp:
    """A thread's request for one exchange, and its outcome."""

    key: str
    act: Callable[[], Any]
    done: bool = False
    result: Any = None
    error: BaseException | None = None

    def fulfil(self) -> None:
        """Run the exchange and keep its result or error."""
        try:
            self.result = self.act()
        except BaseException as error:
            self.error = error


class Coordinator:
    """The pending requests of this rank's threads. One thread at a time negotiates."""

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
        self._wishes: list[_PendingOp] = []
        self._speaking = False
        self._fruitless_since: float | None = None
        self._runs = 0
        self._broken: CollectiveError | None = None
        """Why the graph runs in progress cannot continue."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark that a run of the graph is in progress.

        If the ranks disagree on one exchange of a run, all others of that run fail too,
        because some ranks may never reach them. The next run starts afresh.
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

    def run(self, key: str, act: Callable[[], Any]) -> Any:
        """Call ``act`` once all ranks have reached ``key``, and return its result.

        ``act`` exchanges through the group. Raises what ``act`` raises, and
        CollectiveTimeoutError on every rank if for ``deadline_s`` there was no exchange
        that all of them had reached.
        """
        if self._group.size == 1:
            return act()
        wish = _PendingOp(key, act)
        with self._changed:
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            self._wishes.append(wish)
            self._changed.notify_all()
        try:
            while (known := self._next_speech(wish)) is not None:
                self._speak(known)
        finally:
            with self._changed:
                if wish in self._wishes:
                    self._wishes.remove(wish)
        if wish.error is not None:
            raise wish.error
        return wish.result

    def _next_speech(self, wish: _PendingOp) -> list[_PendingOp] | None:
        """Wait for our turn; return the requests to negotiate, None if ours is done."""
        with self._changed:
            self._changed.wait_for(lambda: wish.done or not self._speaking)
            if wish.done:
                return None
            self._speaking = True
            return list(self._wishes)

    def _speak(self, known: list[_PendingOp]) -> None:
        """Compare lists with the other ranks; run what all have reached."""
        fruitful = False
        try:
            common = self._common([wish.key for wish in known])
            for key in common:
                self._fulfil(next(w for w in known if w.key == key and not w.done))
                if self._broken is not None:
                    break  # All ranks do: they have all got the same error.
            fruitful = bool(common)
        finally:
            with self._changed:
                if not fruitful:
                    # Another thread of this rank may reach what the other ranks wait
                    # for.
                    self._changed.wait_for(
                        lambda: len(self._wishes) > len(known), _PAUSE_S
                    )
                self._speaking = False
                self._changed.notify_all()

    def _fulfil(self, wish: _PendingOp) -> None:
        wish.fulfil()
        with self._changed:
            wish.done = True
            self._wishes.remove(wish)
            if isinstance(wish.error, CollectiveMismatchError):
                self._break(wish.error)
            self._changed.notify_all()

    def _break(self, error: CollectiveError) -> None:
        self._broken = error
        for wish in self._wishes:
            wish.done, wish.error = True, type(error)(str(error))
        self._wishes.clear()

    def _common(self, keys: Sequence[str]) -> list[str]:
        """The exchanges all ranks have reached. Rank 0's clock decides on a timeout."""
        now = self._clock()
        if self._fruitless_since is None:
            self._fruitless_since = now
        late = now - self._fruitless_since > self._deadline_s
        with self._group.exchange(Signature("which operation is next")) as turn:
            said = json.dumps([late, list(dict.fromkeys(keys))]).encode()
            heard = [json.loads(data) for data in turn.transport.allgather(said)]
            lists = [[str(key) for key in theirs] for _, theirs in heard]
            common = [key for key in lists[0] if all(key in keys for keys in lists)]
            if not common and heard[0][0]:
                raise CollectiveTimeoutError(_disagreement(lists, self._deadline_s))
        if common:
            self._fruitless_since = None
        return common


def _disagreement(lists: Sequence[Sequence[str]], deadline_s: float) -> str:
    at = "; ".join(f"rank {rank}: {', '.join(keys)}" for rank, keys in enumerate(lists))
    return (
        f"for {deadline_s:g} s the ranks have been waiting in different operations: "
        f"{at}. Every rank must run the same exchanges: they are matched by name or, "
        "without names, by their order of creation in the graph"
    )

"""Runs of programs that exchange by ops: their errors, late and lost ranks.

None of our Python code runs in such a program. So each run is recorded in the group,
which finds late and lost ranks by the counts of exchanges that the program keeps. When
it has ended, TensorFlow's errors are translated.

What fails on one rank fails on all of them, as a program may catch the error. An op
that gets a rank's own rows may fail there only, such as a lookup of a wrong index. The
other ranks then wait for this one in an exchange of the program. It calls another one
there, from whose name they learn that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime.collective import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    Signature,
)
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.phases import GraphProgress
from tfcluster.runtime.collective.transports.tensorflow.failures import (
    is_of_exchange,
    reason_of,
)
from tfcluster.runtime.collective.transports.tensorflow.transport import (
    TensorFlowTransport,
)
from tfcluster.runtime.partition.collective_ops import (
    SCOPE,
    Collectives,
    Counters,
    OpsExchanger,
)
from tfcluster.runtime.partition.exchange import Exchanger
from tfcluster.runtime.partition.rewrite import Written
from tfcluster.runtime.tensor_types import Tensor

_POLLS_PER_TIMEOUT, _LONGEST_SLEEP_S = 10, 1.0
_BEGUN, _ENDED = "tfcluster_exchanges_begun", "tfcluster_exchanges_ended"


@dataclass(eq=False)
class _Run:
    """A run of a program."""

    before: tuple[int, int]
    """The counts when it began."""
    timed_out: bool = False


class OpRuns:
    """The exchangers and runs of this process, over ``transport``.

    What the ops do not support goes through the exchanger that ``new_host_exchanger``
    returns for a program. ``clock`` is the clock of ``group``, and returns seconds.
    """

    def __init__(
        self,
        group: Group,
        transport: TensorFlowTransport,
        new_host_exchanger: Callable[[str], Exchanger],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._new_host_exchanger = new_host_exchanger
        self._transport = transport
        self._clock = clock
        self._collectives: Collectives | None = None
        self._handles: list[Tensor] = []
        """Those of the variables in which programs count."""
        self._run: _Run | None = None
        self._lock = threading.Lock()
        self._last: tuple[object, float] | None = None
        """The last progress that was seen, and the time when it was first seen."""

    def exchanger(self, program: str) -> Exchanger:
        """The exchanger of a program.

        The first call is an exchange of all ranks; raises what ``Group.exchange`` and
        ``TensorFlowTransport.uses_ops`` raise.
        """
        host = self._new_host_exchanger(program)
        if not self._transport.uses_ops:
            return host
        if self._collectives is None:
            self._collectives = self._connected()
        return OpsExchanger(self._collectives, host, program)

    def running(self, label: str, written: Written) -> AbstractContextManager[None]:
        """A context in which a program of this name runs.

        Raises CollectiveError if an exchange has failed; any other error of the program
        is passed on.
        """
        return self._running(label) if written.words else nullcontext()

    def _connected(self) -> Collectives:
        with self._group.exchange(Signature("devices of the ranks")):
            groups = self._transport.groups
            own = groups.cpus.own
            with tf.device(own):
                self._handles = [_new_counter(name) for name in (_BEGUN, _ENDED)]
            order = self._transport.gathered_order()
        threading.Thread(
            target=self._watch, daemon=True, name="tfcluster-exchange-watch"
        ).start()
        return Collectives(
            self._group.rank, groups, order, Counters(_BEGUN, _ENDED, own)
        )

    # --- in the thread that runs the program ------------------------------------------

    @contextmanager
    def _running(self, label: str) -> Iterator[None]:
        run = _Run(self._counts())
        with self._lock:
            self._last = None
        self._group.begin_graph(f"exchanges of {label}", self._progress)
        self._run = run
        try:
            yield
        except tf.errors.OpError as error:
            self._failed(run, error)
            raise
        else:
            self._group.end_graph(self._ended(run))
        finally:
            self._run = None
            self._group.end_graph(0)

    def _failed(self, run: _Run, error: tf.errors.OpError) -> None:
        """Translate an error of the program; return if the script should get it."""
        group, text = self._group, error.message
        ended, waiting = self._ended(run), self._progress().waiting
        if not waiting and (
            isinstance(error, tf.errors.OutOfRangeError) or self._counts() == run.before
        ):
            # All ranks raise the same: the data has ended between two exchanges, or
            # something was wrong before the first one. The script may catch it.
            group.end_graph(ended)
            return
        if run.timed_out:
            waited = f"rank {group.rank} has waited {self._stall_timeout_s:.0f} s"
            late = CollectiveTimeoutError(f"a rank did not respond in time: {waited}")
            raise group.graph_failed(late, ended) from error
        if group.error_in(text) is not None:
            return
        failure = self._transport.error_of(error)
        if isinstance(failure, CollectiveTimeoutError):  # Another rank has given up.
            failure = PeerLostError(str(failure))
        if is_of_exchange(text, failure, SCOPE):
            raise group.graph_failed(failure, ended) from error
        group.graph_aborted(error, reason_of(text), ended)

    def _ended(self, run: _Run) -> int:
        return self._counts()[1] - run.before[1]

    # --- for other threads ------------------------------------------------------------

    @property
    def _stall_timeout_s(self) -> float:
        return self._transport.timeout_s

    def _counts(self) -> tuple[int, int]:
        """The numbers of exchanges that this rank has begun and ended."""
        # In the other order, one that ends meanwhile could count as ended only.
        ended = _read(self._handles[1])
        return _read(self._handles[0]), ended

    def _progress(self) -> GraphProgress:
        run, counts = self._run, self._counts()
        ended = 0 if run is None else counts[1] - run.before[1]
        with self._lock:
            if self._last is None or self._last[0] != counts:
                self._last = counts, self._clock()
            since = self._last[1]
        return GraphProgress(ended, counts[0] > counts[1], since)

    def _watch(self) -> None:
        """Abort the ops when this rank has waited for too long."""
        sleep_s = min(self._stall_timeout_s / _POLLS_PER_TIMEOUT, _LONGEST_SLEEP_S)
        never = threading.Event()
        while not never.wait(sleep_s):
            run = self._run
            if run is None or run.timed_out or not self._is_late():
                continue
            self._group.stall_report()
            if self._is_late() and self._run is run:
                run.timed_out = True
                self._transport.wait_no_longer(self._stall_timeout_s)

    def _is_late(self) -> bool:
        progress = self._progress()
        waited_s = self._clock() - progress.since
        return progress.waiting and waited_s > self._stall_timeout_s


def _new_counter(name: str) -> Tensor:
    handle: Tensor = tf.raw_ops.VarHandleOp(
        container="", shared_name=name, dtype=tf.int64, shape=[]
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
    return handle


def _read(handle: Tensor) -> int:
    return int(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64))


# --- errors of one rank ---------------------------------------------------------------


_FAILED = "an error in "
"""The beginning of the name of the exchange that a rank calls after an error."""


class Failures:
    """Raises the errors of programs on all ranks, which stay in step."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def running(self, label: str, written: Written) -> AbstractContextManager[None]:
        """See ``row_parts.Running``. Raises the first rank's error, if there is one."""
        return self.together(label) if written.exchanges else nullcontext()

    @contextmanager
    def together(self, label: str) -> Iterator[None]:
        """A context in which ranks exchange, and one may fail.

        Raises the first rank's error on all ranks, if there are any.
        """
        before = self._group.mismatch
        try:
            yield
        except (tf.errors.OpError, CollectiveMismatchError) as error:
            if self._group.failure is not None:
                raise
            first_error = self._firsts(label, error, before)
            if first_error is None:
                raise
            raise first_error from None

    def _firsts(
        self, label: str, error: Exception, before: CollectiveMismatchError | None
    ) -> Exception | None:
        """The error of the first rank that has one; None if it is this rank's."""
        group, own = self._group, True
        mismatch = group.mismatch
        if mismatch is not None and mismatch is not before:
            # Another rank has called the exchange while this one was in the program.
            if _FAILED not in str(mismatch):
                return None
            own = str(mismatch) not in str(error)
        else:
            try:
                with group.exchange(Signature(f"{_FAILED}{label}")):
                    pass  # All ranks have failed.
            except CollectiveMismatchError:
                pass  # Now the others know it.
            except CollectiveError:
                return None
        text = error.message if isinstance(error, tf.errors.OpError) else str(error)
        ours = json.dumps([type(error).__name__, text] if own else None).encode()
        try:
            sent = allgather_bytes(group, ours, Signature(f"errors in {label}"))
        except CollectiveError:
            return None
        errors = [json.loads(data) for data in sent]
        rank = next((rank for rank, text in enumerate(errors) if text), group.rank)
        if rank == group.rank:
            return None
        kind, message = errors[rank]
        cls = getattr(tf.errors, kind, tf.errors.UnknownError)
        error_of_rank: Exception = cls(None, None, message)
        return error_of_rank

"""The process group: rank and size of this process, and the group of all ranks.

Does not use Keras; imports TensorFlow only for the transport of that name.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tfcluster.base.vocabulary import RANKED_TYPES
from tfcluster.plan.model import Strategy
from tfcluster.runtime.collective import CollectiveError, Group, Signature
from tfcluster.runtime.collective.collectives import meet
from tfcluster.runtime.collective.peer_monitor import PeerMonitor
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.context import Context, context_from
from tfcluster.runtime.files.order import train_here
from tfcluster.runtime.net.rendezvous import Member
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.telemetry import exit_status
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.exit_status import cause
from tfcluster.runtime.telemetry.rank_claim import agent_answers, claim
from tfcluster.runtime.telemetry.stack_dump import program_line
from tfcluster.runtime.telemetry.tracer import tracer

_FOREVER_S = 20 * 86400.0
"""No timeout: nearly the maximum that poll(2) accepts."""

_MOST_CLAIMS = 1 << 20
"""More than the number of processes that can claim a task's rank in one attempt."""

Joining = Callable[[str], AbstractContextManager[None]]
"""A context manager to connect ranks outside of exchanges; its argument says why."""

_group: Group | None = None
_at_shutdown: list[Callable[[], None]] = []
"""Called before the ranks disconnect."""


@functools.cache
def context() -> Context:
    """The context of this process, from its environment; cached.

    Raises ContextError if the environment contradicts itself.
    """
    return context_from(os.environ)


def init() -> None:
    """Initialise the process group; further calls do nothing.

    Ranks connect at the first exchange. Raises CollectiveError if there are other ranks
    but their addresses are not known, if the configured transport does not exist, and,
    with transport 'tensorflow', if TensorFlow has already executed an op; ContextError
    if the environment contradicts itself; NoRankError in a ps or data task. Follows
    ``init`` of horovod/common/basics.py, without its arguments.
    """
    join(context())


def is_initialized() -> bool:
    """Whether the process group is initialised, by the program or by the runtime."""
    return _group is not None


def shutdown() -> None:
    """Leave the process group. Ranks that wait for this one get a PeerLostError.

    Removes all process sets. Does nothing before ``init``, which may be called again.
    """
    global _group
    for forget in _at_shutdown:
        forget()
    if _group is not None:
        SIGNALS.coordinate(None)
        _group.close()
        _group = None


def at_shutdown(act: Callable[[], None]) -> None:
    """Register ``act`` to be called before this rank disconnects."""
    _at_shutdown.append(act)


def rank() -> int:
    """The rank of this process among those that train; 0 is the chief.

    Without a launcher this is rank 0 of 1. Needs neither ``init`` nor TensorFlow.
    Raises NoRankError in a ps or data task, and ContextError if the environment
    contradicts itself; so do the following functions. They follow
    horovod/common/basics.py.
    """
    return context().rank


def size() -> int:
    """The number of processes that train together; 1 without a launcher.

    Raises what ``rank`` raises.
    """
    return context().size


def local_rank() -> int:
    """The rank of this process among those on its host.

    Raises what ``rank`` raises.
    """
    return context().local_rank


def local_size() -> int:
    """The number of ranks on this host.

    Raises what ``rank`` raises.
    """
    return context().local_size


def cross_rank() -> int:
    """The rank of this process among those with its local rank on all hosts.

    Raises what ``rank`` raises.
    """
    return context().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this local rank.

    Raises what ``rank`` raises.
    """
    return context().cross_size


def is_chief() -> bool:
    """Whether this is rank 0.

    Raises what ``rank`` raises.
    """
    return context().is_chief


def barrier() -> None:
    """Return when all ranks have called.

    Raises CollectiveMismatchError on all ranks if some call something else, and another
    CollectiveError before ``init`` or if a rank is lost or late. Follows ``barrier`` of
    horovod/tensorflow/mpi_ops.py.
    """
    meet(group(), Signature("barrier"))
    exchanged(combined=False)


def exchanged(*, combined: bool) -> None:
    """Report that the program itself has called a collective operation.

    For a program that distributes its training by itself, only operations that combine
    values of all ranks count: a broadcast of the initial weights proves nothing.
    """
    if combined or not program_kind.distributes_itself():
        reporter().exchanged()


def group() -> Group:
    """The group of all ranks. Raises CollectiveError before ``init``."""
    if _group is None:
        raise CollectiveError("the ranks are not connected: call init() first")
    return _group


def join(context: Context) -> Group:
    """The group of all ranks of ``context``; created once per process.

    Raises CollectiveError; see ``init``.
    """
    global _group
    if _group is None:
        train_here(context.attempt, context.local_rank)
        _group = _group_of(context)
    return _group


def group_among(ranks: Sequence[int], token: bytes) -> Group:
    """Create and connect a group of some ranks, which include this one.

    ``token`` authenticates its connections. Raises CollectiveError.
    """
    described = context()
    transport = HostTransport(
        Member(ranks.index(described.rank), len(ranks), token, described.attempt),
        [described.addresses[rank] for rank in ranks] if len(ranks) > 1 else [""],
        timeout_s=_timeout_s(described),
    )
    if len(ranks) > 1:
        transport.join()
    created = Group(
        transport,
        on_failure=lambda error: reporter().failure(str(error)),
        tracer=tracer(),
        section=SIGNALS.elsewhere,
    )
    atexit.register(created.close)
    return created


def _leave_in_child() -> None:
    """Leave the group in a forked child, which is not a rank.

    Otherwise the child would keep the connections of its parent open. If the parent has
    not connected yet, the child may be the process that trains, and keeps the group.
    """
    if _group is not None and _group.begun:
        shutdown()


os.register_at_fork(after_in_child=_leave_in_child)


def _group_of(context: Context) -> Group:
    name = context.options.transport
    if name not in _TRANSPORTS:
        raise CollectiveError(
            f"unknown transport {name!r}; available: {', '.join(_TRANSPORTS)}"
        )
    if context.size > 1 and (not context.addresses or not context.token):
        raise CollectiveError(
            f"rank {context.rank} of {context.size} does not know the addresses of the "
            "other ranks: TF_CONFIG and TFCLUSTER_TOKEN are missing. tfcluster launch "
            "sets them"
        )
    exit_status.install()
    monitor = _monitor(context) if context.size > 1 else None

    def enter() -> None:
        generation = _generation(context)
        transport.enter(generation)
        if monitor is not None:
            monitor.enter(generation)
        # Again, because this process may have been forked since the group was created.
        reporter().on_waiting(ranks.waiting)
        _leave_at_end(ranks)

    @contextmanager
    def joining(what: str) -> Iterator[None]:
        ranks.begin()
        with monitor.joining(what) if monitor is not None else nullcontext():
            yield

    transport = _TRANSPORTS[name](context, joining)
    ranks = Group(
        transport,
        monitor=monitor,
        enter=enter if agent_answers() else None,
        on_failure=lambda error: reporter().failure(str(error)),
        tracer=tracer(),
    )
    reporter().on_waiting(ranks.waiting)
    if monitor is not None and not _waits_unseen(context):
        ranks.met, monitor.told = SIGNALS.heard_in, SIGNALS.heard
        SIGNALS.say_late = lambda name: reporter().warning(
            f"{name}: all ranks run the script's handler together, as soon as rank "
            f"{context.rank} has done what it does at {program_line() or 'present'}"
        )
        SIGNALS.coordinate(ranks)
    atexit.register(_leave_at_exit, ranks)
    return ranks


def _waits_unseen(context: Context) -> bool:
    """Whether ranks may wait for each other where ``SIGNALS`` cannot see it.

    Asynchronous ranks wait for notes at a ps, and sessions of TensorFlow 1 for values.
    """
    served = context.strategy is not Strategy.COLLECTIVE and context.parameter_servers
    waits = context.is_independent or program_kind.is_tf1_script()
    return bool(served) and waits


def _generation(context: Context) -> int:
    """The generation of ranks: processes with equal attempt and claim connect.

    A task may train in several processes one after the other; then all tasks do so.
    """
    return context.attempt * _MOST_CLAIMS + claim(context.task).number


def _leave_at_end(group: Group) -> None:
    """Close the group in a multiprocessing child, which does not run ``atexit``."""
    util = sys.modules.get("multiprocessing.util")
    parent = getattr(sys.modules.get("multiprocessing"), "parent_process", None)
    if util is not None and parent is not None and parent() is not None:
        util.Finalize(None, group.close, exitpriority=0)


def _leave_at_exit(group: Group) -> None:
    """At exit, tell the other ranks why this program ends, and compare the models."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        group.close(cause(error) or "")
        return
    ending = group.end()
    if ending.warning:
        reporter().warning(ending.warning)
    if ending.error:
        exit_status.fail(ending.error)


def _member(context: Context) -> Member:
    return Member(context.rank, context.size, context.token, context.attempt)


def _monitor(context: Context) -> PeerMonitor:
    options = context.options
    return PeerMonitor(
        _member(context),
        context.addresses,
        # The first exchange has the same timeout as all others.
        join_timeout_s=_timeout_s(context),
        warning_s=options.stall_warning_s,
    )


def _ends(context: Context) -> tuple[Member, Sequence[str]]:
    return _member(context), context.addresses or ("localhost:0",)


def _timeout_s(context: Context) -> float:
    return context.options.stall_timeout_s or _FOREVER_S


def _auto(context: Context, joining: Joining) -> HostTransport:
    # Without GPUs, do not ask the ranks: they would wait for each other at the first
    # op.
    if not context.own_gpus or context.strategy is not Strategy.COLLECTIVE:
        return _upon_host(context, joining)

    def use_host(why: str) -> None:
        if context.rank == 0:
            reporter().warning(f"transport: host, because {why}")

    return _tensorflow(context, joining, unless=use_host)


def _upon_host(context: Context, joining: Joining) -> HostTransport:
    return HostTransport(*_ends(context), timeout_s=_timeout_s(context))


def _mpi(context: Context, joining: Joining) -> HostTransport:
    from tfcluster.runtime.collective.transports.mpi import MpiTransport

    return MpiTransport(*_ends(context), timeout_s=_timeout_s(context))


def _tensorflow(
    context: Context,
    joining: Joining,
    unless: Callable[[str], None] | None = None,
) -> HostTransport:
    if context.size == 1:
        return _upon_host(context, joining)
    from tfcluster.runtime.collective.transports.tensorflow.lazy_server import (
        ClusterTask,
    )
    from tfcluster.runtime.collective.transports.tensorflow.transport import (
        TensorFlowTransport,
    )

    jobs = {
        job: addresses
        for job, addresses in context.cluster.items()
        if job in RANKED_TYPES
    }
    return TensorFlowTransport(
        # The ranks connect at the address that TensorFlow's server takes over later.
        *_ends(context),
        ClusterTask(jobs, context.task_type, context.task_index),
        joining=joining,
        timeout_s=_timeout_s(context),
        unless=unless,
    )


_TRANSPORTS: dict[str, Callable[[Context, Joining], HostTransport]] = {
    "auto": _auto,
    "host": _upon_host,
    "mpi": _mpi,
    "tensorflow": _tensorflow,
}

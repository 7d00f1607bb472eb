"""Horovod's functions that train nothing: queries about the library, timeline, join.

tfcluster communicates over TCP and shared memory itself, as Horovod does with Gloo. So
it answers that Gloo is available, for scripts and tests that require some library.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import time
from collections import Counter
from pathlib import Path

from tfcluster.runtime import process_group
from tfcluster.runtime.collective import CollectiveMismatchError, Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.process_group import context


def gloo_built(verbose: bool = False) -> bool:
    """True: ranks exchange without MPI. ``verbose`` is ignored."""
    return True


def gloo_enabled() -> bool:
    """Whether this run communicates without MPI. Raises ContextError."""
    return not mpi_enabled()


def mpi_built(verbose: bool = False) -> bool:
    """Whether this run uses ``transport: mpi``; does not search for MPI itself.

    ``verbose`` is ignored. Raises ContextError if the environment is inconsistent.
    """
    return mpi_enabled()


def mpi_enabled() -> bool:
    """Whether this run communicates with MPI. Raises ContextError."""
    return context().options.transport == "mpi"


def mpi_threads_supported() -> bool:
    """False: a multithreaded program must not call MPI beside tfcluster."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """0: the host's CPU combines the tensors, except with ``transport: tensorflow``."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """False: there is no IBM DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """False: tensors on GPUs are copied to the host to be exchanged."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """False: tensors on GPUs are copied to the host to be exchanged."""
    return False


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks.

    Hosts are distinguished by their names in TF_CONFIG. Raises ContextError if the
    environment is inconsistent. Follows ``is_homogeneous`` of horovod/common/basics.py.
    """
    hosts = Counter(address.rpartition(":")[0] for address in context().addresses)
    return len(set(hosts.values())) <= 1


def check_extension(*args: object, **kwargs: object) -> None:
    """Do nothing: there is no extension to build."""


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether Adasum can combine this many ranks: 1, 2, 4, 8, ...

    Follows ``num_rank_is_power_2`` of horovod/common/util.py.
    """
    return num_rank > 0 and not num_rank & (num_rank - 1)


class Timeline:
    """The exchanges of this rank that have not been written yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[dict[str, object]] = []

    def add(self, what: str, start_s: float, end_s: float) -> None:
        """Record the exchange ``what``; start and end are in seconds."""
        verb, _, name = what.partition(" of ")
        self._events.append(
            {
                "name": what,
                "cat": verb,
                "ph": "X",
                "pid": os.getpid(),
                "tid": name or verb,
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
            }
        )

    def write(self) -> None:
        """Write all events as JSON in Chrome's trace event format."""
        self._path.write_text(json.dumps(self._events), encoding="utf-8")


_timeline: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record exchanges from now on; ``stop_timeline`` or the exit writes the file.

    Rank 0 writes ``file_path`` in Chrome's Trace Event Format (times in microseconds,
    by the group's clock); other ranks do nothing. ``mark_cycles``
    is ignored: there are no cycles. Raises ValueError if a timeline is already being
    recorded, OSError if the file cannot be written, CollectiveError before ``init``.
    Follows ``start_timeline`` of horovod/common/basics.py.
    """
    global _timeline
    if _timeline is not None:
        raise ValueError("a timeline is already being written: call stop_timeline")
    if not process_group.is_chief():
        return
    _timeline = Timeline(Path(file_path))
    _timeline.write()
    process_group.group().observe(_timeline.add)
    atexit.register(stop_timeline)


def stop_timeline() -> None:
    """Write the file and stop recording. Does nothing without a timeline.

    Raises OSError if the file cannot be written.
    """
    global _timeline
    if _timeline is None:
        return
    if process_group.is_initialized():
        process_group.group().observe(None)
    _timeline.write()
    _timeline = None
    atexit.unregister(stop_timeline)


_TIME = struct.Struct(">d")


def join(device: object = None) -> int:
    """Wait until all ranks have called this; return the rank that called it last.

    The clocks of the hosts decide which rank was last. ``device`` is ignored. Raises
    CollectiveMismatchError on all ranks if some of them still train, and another
    CollectiveError before ``init`` or if a rank is lost or late. Horovod's ``join``
    (horovod/tensorflow/mpi_ops.py) lets a rank without data contribute zeros to the
    others' exchanges, so that the last batches give different results than in a single
    process.
    """
    arrival = _TIME.pack(time.time())
    try:
        arrivals = allgather_bytes(process_group.group(), arrival, Signature("join"))
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{error}. A rank without more data cannot wait in join() while others "
            "train: give all ranks the same number of steps, for instance "
            "int(hvd.allreduce(steps, op=hvd.Min)); or let tfcluster divide the "
            "batches, which also handles uneven batches"
        ) from error
    times = [_TIME.unpack(data)[0] for data in arrivals]
    return times.index(max(times))

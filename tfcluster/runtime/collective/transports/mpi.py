"""The ``mpi`` transport: MPI all-reduces vectors, all else is as with ``host``.

MPI (MPICH or a derivative of it) is initialised within the existing processes, without
mpiexec: see ``pmi_server``. It is never finalized, because MPI_Finalize would wait for
ranks that may be gone. mpi4py is imported at the first exchange.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfcluster.runtime.collective.transports.base import Array, ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import (
    DIRECT_BYTES,
    HostTransport,
)
from tfcluster.runtime.collective.transports.multiplexed_sockets import PeerSockets
from tfcluster.runtime.collective.transports.pmi_server import ProcessManager, serving
from tfcluster.runtime.collective.transports.topology import own_host_key
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)

_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.PRODUCT: "PROD",
}
_REAL = frozenset("bhilqBHILQfd")
_COMPLEX = frozenset("FD")
"""numpy's codes of the types that MPI adds and multiplies like numpy."""

_BUSY_LOOKS = 200
_BUSY_S = 1.0
_PAUSE_S = 1e-4
"""MPI makes progress only while it is polled: at first constantly, later less often."""

_SHARED = "/dev/shm/"

_abandoned: list[object] = []
"""Abandoned operations: MPI may still write into their vectors."""


@dataclass(frozen=True, slots=True)
class MpiRankInfo:
    """The data that each rank sends to all others before MPI is initialised."""

    host_key: str
    job: str
    """A new job name; all ranks use rank 0's name."""
    library: str = ""
    problem: str = ""


class MpiTransport(HostTransport):
    """A ``HostTransport`` whose all-reduce is MPI_Iallreduce.

    Ranks with equal ``host_key`` share memory. The first operation raises
    CollectiveError on all ranks if one of them cannot start MPI.
    """

    _mpi: Any = None
    """``mpi4py.MPI``, initialised on first use; None if there is only one rank."""
    _manager: ProcessManager | None = None
    _starts = False

    @property
    def small_bytes(self) -> int:
        """See ``HostTransport``. MPI may be much faster than TCP."""
        return DIRECT_BYTES

    @property
    def several_hosts(self) -> bool:
        """False: MPI sends the large vectors."""
        return False

    @property
    def scatters(self) -> bool:
        """False: MPI adds in an order of its own."""
        return False

    def allreduce(
        self, buffer: Array, op: ReduceOp, source: Array | None = None
    ) -> None:
        """See ``HostTransport``; dtypes that MPI does not know are sent without it.

        An MPI error also raises PeerLostError.
        """
        self.connected()
        mpi = self._mpi
        if mpi is None or not reducible(buffer.dtype, op):
            super().allreduce(buffer, op, source)
            return
        if source is not None:
            buffer[:] = source
        try:
            with self.elsewhere(buffer.nbytes):
                request = mpi.COMM_WORLD.Iallreduce(
                    mpi.IN_PLACE, buffer, getattr(mpi, _OPS[op])
                )
                self._wait(request, buffer)
        except mpi.Exception as error:
            raise PeerLostError(f"MPI: {error}") from error

    def _wait(self, request: Any, buffer: Array) -> None:
        """Poll until the request is done: MPI_Wait could not be interrupted."""
        for _ in range(_BUSY_LOOKS):
            if request.Test():
                return
        began = time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - began
            if self._interrupted.is_set() or waited_s > self.timeout_s:
                _abandoned.append((request, buffer))
                if self._interrupted.is_set():
                    raise PeerLostError("a rank has left while MPI waited for it")
                raise CollectiveTimeoutError(
                    f"MPI has waited for other ranks for {self.timeout_s:g} s"
                )
            if waited_s < _BUSY_S:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)

    def connected(self) -> PeerSockets:
        sockets = super().connected()
        if self.size > 1 and not self._starts:
            self._starts = True  # The ranks exchange data meanwhile.
            self._mpi = self._start()
        return sockets

    def _start(self) -> Any:
        """Initialise MPI on all ranks; raises on all of them if one cannot."""
        host_key = _memory_host_key() if self._host_key is None else self._host_key
        job = f"tfcluster-{secrets.token_hex(8)}"
        mpi: Any = None
        try:
            mpi = load()
            site = MpiRankInfo(host_key, job, library=library(mpi))
        except CollectiveError as error:
            site = MpiRankInfo(host_key, job, problem=str(error))
        answers = self.allgather(json.dumps(asdict(site)).encode())
        sites = [MpiRankInfo(**json.loads(answer)) for answer in answers]
        if problem := disagreement(sites):
            raise CollectiveError(f"transport mpi: {problem}")
        host_keys = [site.host_key or f"rank {r}" for r, site in enumerate(sites)]
        self._manager = ProcessManager(sites[0].job, host_keys, self.allgather)
        files = _shared_files()
        with serving(self._manager, self.rank, self.size):
            initialize(mpi)
        if self._manager.failure is not None:
            raise CollectiveError(
                f"transport mpi: the ranks lost each other while MPI started: "
                f"{self._manager.failure}"
            ) from self._manager.failure
        world = mpi.COMM_WORLD
        if (world.rank, world.size) != (self.rank, self.size):
            raise CollectiveError(
                f"transport mpi: {library(mpi)} numbers rank {self.rank} of "
                f"{self.size} as rank {world.rank} of {world.size}"
            )
        world.Set_errhandler(mpi.ERRORS_RETURN)
        self.allgather(b"")
        _forget(_shared_files() - files)
        return mpi


def reducible(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Whether MPI can reduce this dtype by ``op`` with the same result as numpy."""
    if not dtype.isnative:
        return False
    ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    return dtype.char in _REAL or (dtype.char in _COMPLEX and not ordered)


def disagreement(sites: Sequence[MpiRankInfo]) -> str | None:
    """A sentence that says why these ranks cannot form an MPI job; None if they can."""
    problems: dict[str, list[int]] = {}
    for rank, site in enumerate(sites):
        if site.problem:
            problems.setdefault(site.problem, []).append(rank)
    if not problems:
        for rank, site in enumerate(sites):
            problems.setdefault(site.library, []).append(rank)
        if len(problems) == 1:
            return None
    return "; ".join(
        f"rank {', '.join(map(str, ranks))}: {problem}"
        for problem, ranks in problems.items()
    )


def load() -> Any:
    """``mpi4py.MPI``, not yet initialised.

    Raises CollectiveError if mpi4py or an MPI library is missing, if only the library's
    own mpiexec can start it (Open MPI), or if the program has initialised MPI itself.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CollectiveError(
            f"mpi4py or its MPI library cannot be loaded by {sys.executable} ({reason})"
            ": pip install 'tfcluster[mpi]'"
        ) from error
    vendor, _ = MPI.get_vendor()
    if vendor == "Open MPI":
        raise CollectiveError(
            "Open MPI can be started only by its own mpiexec; install MPICH or a "
            "compatible MPI: pip install 'tfcluster[mpi]'"
        )
    if MPI.Is_initialized():
        raise CollectiveError(
            "the program has initialized MPI itself; only tfcluster may do that "
            "(mpi4py.rc.initialize = False before mpi4py.MPI is imported)"
        )
    return MPI


def library(mpi: Any) -> str:
    """Name and version of the MPI library; all ranks need the same one."""
    text: str = mpi.Get_library_version()
    return " ".join(text.splitlines()[0].split()).rstrip("\0")


def initialize(mpi: Any) -> None:
    """Initialise MPI for use from any thread. Raises CollectiveError."""
    # Not with mpi4py's Init_thread: it holds the GIL, and another thread of this
    # process is MPI's process manager.
    provided = ctypes.c_int()
    init = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    code = init(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided))
    if code != mpi.SUCCESS:
        raise CollectiveError(f"transport mpi: MPI_Init_thread failed with {code}")
    # There is one exchange at a time, but from any of TensorFlow's threads.
    if provided.value < mpi.THREAD_SERIALIZED:
        raise CollectiveError(
            f"transport mpi: {library(mpi)} cannot be used from several threads"
        )


def _memory_host_key() -> str:
    """A text that is equal for processes that share memory; empty if unknown."""
    try:
        memory = Path("/dev/shm").stat()
    except OSError:
        return ""
    host_key = own_host_key()
    return host_key and f"{host_key} {memory.st_dev} {memory.st_ino}"


def _shared_files() -> set[str]:
    """Paths of the files in /dev/shm that this process has mapped."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.partition(_SHARED)[2] for line in maps if _SHARED in line}
    return {f"{_SHARED}{path}" for path in paths if not path.endswith("(deleted)")}


def _forget(files: Iterable[str]) -> None:
    """Unlink MPI's shared files: all ranks have opened them, and may be killed."""
    for path in files:
        with suppress(OSError):
            Path(path).unlink()

"""Horovod's queries about the communication library.

tfcluster communicates over TCP and shared memory itself, as Horovod does with Gloo. So
it answers that Gloo is available, for scripts and tests that require some library.
"""

from __future__ import annotations

from collections import Counter

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

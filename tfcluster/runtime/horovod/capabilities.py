"""What the exchange is built on, asked as Horovod's scripts ask.

tfcluster exchanges over TCP and shared memory by itself, as Horovod does with Gloo: so
that is what scripts and tests that look for a way to exchange are told they have.
"""

from __future__ import annotations

from collections import Counter

from tfcluster.runtime.process_group import context


def gloo_built(verbose: bool = False) -> bool:
    """True: ranks exchange without MPI."""
    return True


def gloo_enabled() -> bool:
    """Whether ranks exchange without MPI in this run."""
    return not mpi_enabled()


def mpi_built(verbose: bool = False) -> bool:
    """Whether ``transport: mpi`` is chosen; without it nothing of MPI is looked at."""
    return mpi_enabled()


def mpi_enabled() -> bool:
    """Whether ranks exchange by MPI in this run."""
    return context().options.transport == "mpi"


def mpi_threads_supported() -> bool:
    """False: a program of several threads must not call MPI beside tfcluster."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """0: exchanges are on the host's processor, but for ``transport: tensorflow``."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """False: there is no IBM DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """False: tensors on GPUs are exchanged by way of the host."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """False: tensors on GPUs are exchanged by way of the host."""
    return False


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    hosts = Counter(address.rpartition(":")[0] for address in context().addresses)
    return len(set(hosts.values())) <= 1


def check_extension(*args: object, **kwargs: object) -> None:
    """Nothing: there is nothing to be built."""


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether Adasum can combine so many ranks."""
    return num_rank > 0 and not num_rank & (num_rank - 1)

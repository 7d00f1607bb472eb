"""Rank, size and their local and cross forms, from the launcher's variables. Pure.

Knows the environment variables of MPI launchers and Slurm, but not TF_CONFIG.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfcluster.runtime.errors import ContextError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank and size of a process in total, on its host and across hosts, as in Horovod.

    ``local`` counts the ranks on the same host, and ``cross`` counts the hosts that
    have a rank with this local rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


ALONE = RankInfo()
"""The RankInfo of a program that was started alone."""


def rank_info_among(hosts: Sequence[str], rank: int) -> RankInfo:
    """The RankInfo of ``rank``; ``hosts`` are the hosts of all ranks, in rank order."""
    host = hosts[rank]
    local_rank = hosts[:rank].count(host)
    # The hosts that have a rank with this local rank, in the order of their first rank.
    peers = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
    return RankInfo(
        rank=rank,
        size=len(hosts),
        local_rank=local_rank,
        local_size=hosts.count(host),
        cross_rank=peers.index(host),
        cross_size=len(peers),
    )


def rank_info_from(env: Mapping[str, str]) -> RankInfo:
    """The RankInfo that MPI or Slurm gave this process; ``ALONE`` if neither did.

    MPI has precedence: with ``mpirun`` inside a Slurm job, every rank inherits the
    Slurm variables of mpirun's daemon. Grid Engine does not number the processes of a
    parallel job, and tasks of an array job are independent: there, only MPI knows the
    numbers.

    Raises ContextError if the numbers contradict each other.
    """
    return _mpi(env) or _slurm(env) or ALONE


_MPI_WORDS = (
    # rank, size, local rank, local size: Open MPI; MVAPICH2; Hydra (MPICH, Intel MPI).
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _mpi(env: Mapping[str, str]) -> RankInfo | None:
    for rank_word, size_word, local_rank_word, local_size_word in _MPI_WORDS:
        if rank_word not in env or size_word not in env:
            continue
        size = number(env, size_word, at_least=1)
        rank = number(env, rank_word, below=size)
        if local_rank_word not in env or local_size_word not in env:
            return RankInfo(rank=rank, size=size, cross_rank=rank, cross_size=size)
        local_size = number(env, local_size_word, at_least=1)
        # No launcher tells ranks the number of their host; assume that hosts are filled
        # one after the other.
        return RankInfo(
            rank=rank,
            size=size,
            local_rank=number(env, local_rank_word, below=local_size),
            local_size=local_size,
            cross_rank=rank // local_size,
            cross_size=-(-size // local_size),
        )
    return None


def _slurm(env: Mapping[str, str]) -> RankInfo | None:
    # A batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but is not a rank. Only a
    # job step (srun) has SLURM_STEP_NUM_TASKS.
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
        return None
    size = number(env, "SLURM_STEP_NUM_TASKS", at_least=1)
    rank = number(env, "SLURM_PROCID", below=size)
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = number(env, "SLURM_NODEID", default=0, below=len(counts))
    local_rank = number(env, "SLURM_LOCALID", default=0, below=counts[node])
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=counts[node],
        cross_rank=sum(count > local_rank for count in counts[:node]),
        cross_size=sum(count > local_rank for count in counts),
    )


_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's short form of a list of counts: ``2(x3),1`` is [2, 2, 2, 1].

    Raises ContextError for any other form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise ContextError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def number(
    env: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    at_least: int = 0,
    below: int | None = None,
) -> int:
    """The integer in ``env[name]``, with ``at_least <= number < below``.

    Raises ContextError if it is missing without a default, or out of range.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ContextError(f"{name} is not set, although related variables are")
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < at_least or (below is not None and value >= below):
        limit = f"{at_least} or more" if below is None else f"{at_least} to {below - 1}"
        raise ContextError(f"{name}={text!r} is not an integer, {limit}")
    return value

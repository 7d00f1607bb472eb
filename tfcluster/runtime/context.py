"""The context of a task: the content of its environment as one frozen value. Pure.

Reads a given mapping, never the environment of the process, and starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfcluster.base.vocabulary import RANKED_TYPES
from tfcluster.plan.model import Runtime, Strategy
from tfcluster.runtime.errors import ContextError, NoRankError
from tfcluster.runtime.process_identity import (
    ALONE,
    RankInfo,
    number,
    rank_info_among,
    rank_info_from,
)

_SERVING_TYPES = ("ps", "data")
_OUTSIDE_TYPES = ("evaluator", "data")
"""Types of tasks outside of TensorFlow's cluster, which has no evaluator or data tasks.
"""


@dataclass(frozen=True, slots=True)
class Recording:
    """The recording of a task's training that ``tfcluster verify`` requests."""

    folder: str
    """Where the task writes the recording."""
    steps: int | None
    """The number of steps after which the task waits to be stopped; None if it ends by
    itself."""
    seed: int
    """The seed of all random generators before the program's first line."""
    moved: bool = False
    """Whether gradients are moved by about their rounding errors."""
    xla: bool = True
    """Whether the ranks can train with XLA; if not, neither does one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A task's identity, and what it knows about the other tasks.

    ``rank``, ``size`` and their local and cross forms raise NoRankError in a ps or data
    task. An evaluator is not part of the training cluster: it is rank 0 of 1.
    """

    task_type: str = "worker"
    task_index: int = 0
    rank_info: RankInfo | None = ALONE
    """None in a task without a rank."""
    addresses: tuple[str, ...] = ()
    """``host:port`` of every rank, in rank order; empty if unknown."""
    cluster: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """TF_CONFIG's cluster: addresses by job."""
    run: str | None = None
    """The run's id; None if tfcluster did not start this program."""
    attempt: int = 0
    token: bytes = field(default=b"", repr=False)
    """The run's secret, 32 bytes, with which its sockets are authenticated."""
    strategy: Strategy = Strategy.NONE
    """How the ranks train together; equal to ``options.strategy``."""
    options: Runtime = field(default_factory=Runtime)
    data_service: str | None = None
    """``grpc://host:port`` of the tf.data service; None if the run has none."""
    data_tasks: int = 1
    """The number of workers of that service."""
    parameter_servers: tuple[str, ...] = ()
    """``host:port`` of the parameter service of every ps task, in order."""
    device_filters: tuple[str, ...] = ()
    """Device filters of the task's sessions; if empty, they see all devices."""
    own_gpus: bool = False
    """Whether the launcher has given each rank its own GPU, and the transport may be
    chosen accordingly."""
    recording: Recording | None = None
    """None except with ``tfcluster verify``."""

    @property
    def rank(self) -> int:
        """The rank of this task. Raises NoRankError if it does not train, like a ps."""
        return self._require_rank().rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._require_rank().size

    @property
    def local_rank(self) -> int:
        """The rank of this task among the ranks on its host."""
        return self._require_rank().local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._require_rank().local_size

    @property
    def cross_rank(self) -> int:
        """The rank of this task among the ranks with its local rank on all hosts."""
        return self._require_rank().cross_rank

    @property
    def cross_size(self) -> int:
        """The number of hosts that have a task with this local rank."""
        return self._require_rank().cross_size

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are on this rank's host."""
        return self.local_size == self.size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self._require_rank().rank == 0

    @property
    def is_independent(self) -> bool:
        """Whether ranks do not wait for each other, and share only the ps tasks."""
        served = self.strategy is Strategy.PARAMETER_SERVER
        return served and not self.options.synchronous

    @property
    def task(self) -> str:
        """The task's name in commands and messages: ``worker:0``."""
        return f"{self.task_type}:{self.task_index}"

    @property
    def trains(self) -> bool:
        """Whether to install the training runtime for this task's program."""
        return self.strategy is not Strategy.NONE and self.task_type in RANKED_TYPES

    def _require_rank(self) -> RankInfo:
        if self.rank_info is None:
            raise NoRankError(
                f"{self.task} has no rank: only chief and worker tasks train together"
            )
        return self.rank_info


def context_from(env: Mapping[str, str]) -> Context:
    """The context that an environment describes.

    TF_CONFIG and tfcluster's own variables have precedence over the variables of MPI or
    Slurm; without any of them the program is alone. Raises ContextError if they
    contradict each other or violate TensorFlow's rules for TF_CONFIG.
    """
    cluster, task_type, index = _identity(env)
    addresses = rank_addresses(cluster)
    strategy = _strategy(env.get("TFCLUSTER_STRATEGY", "none"))
    return Context(
        task_type=task_type,
        task_index=index,
        rank_info=_rank_info(env, task_type, index, cluster),
        addresses=addresses if task_type in RANKED_TYPES else (),
        cluster=cluster,
        run=env.get("TFCLUSTER_RUN"),
        attempt=number(env, "TFCLUSTER_ATTEMPT", default=0),
        token=_token(env.get("TFCLUSTER_TOKEN", "")),
        strategy=strategy,
        options=_options(env.get("TFCLUSTER_RUNTIME", ""), strategy),
        data_service=env.get("TFCLUSTER_DATA_SERVICE"),
        data_tasks=number(env, "TFCLUSTER_DATA_TASKS", default=1, at_least=1),
        parameter_servers=_listed(env.get("TFCLUSTER_PARAMETER_SERVERS", "")),
        device_filters=_filters(env.get("TFCLUSTER_DEVICE_FILTERS", "[]")),
        own_gpus=env.get("TFCLUSTER_OWN_GPUS") == "1",
        recording=_recording(env.get("TFCLUSTER_RECORDING", "")),
    )


def rank_addresses(cluster: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """``host:port`` of the tasks that train, in rank order: chief, then workers."""
    return tuple(address for kind in RANKED_TYPES for address in cluster.get(kind, ()))


def _identity(
    env: Mapping[str, str],
) -> tuple[dict[str, tuple[str, ...]], str, int]:
    """The cluster, this task's type and its index; ``({}, "worker", 0)`` when alone."""
    cluster: dict[str, tuple[str, ...]] = {}
    task_type, index = "worker", 0
    config = _object(env.get("TF_CONFIG", ""), "TF_CONFIG")
    if config:
        cluster = _cluster(config.get("cluster", {}))
        task_type, index = _task(config.get("task"), cluster)
    named = env.get("TFCLUSTER_TASK")
    if named is not None:
        kind, _, position = named.partition(":")
        if not kind or not (position.isascii() and position.isdecimal()):
            raise ContextError(f"TFCLUSTER_TASK={named!r} is not TYPE:INDEX")
        if config and (task_type, index) != (kind, int(position)):
            raise ContextError(
                f"TFCLUSTER_TASK is {named}, but TF_CONFIG's task is "
                f"{task_type}:{index}"
            )
        task_type, index = kind, int(position)
    return cluster, task_type, index


def _cluster(by_job: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(by_job, dict):
        raise ContextError("TF_CONFIG: 'cluster' is not an object")
    cluster: dict[str, tuple[str, ...]] = {}
    for job, addresses in by_job.items():
        # TensorFlow 1 called the chief "master".
        kind = "chief" if job == "master" else job
        if kind in _OUTSIDE_TYPES:
            raise ContextError(f"TF_CONFIG: {job!r} tasks do not belong in 'cluster'")
        if kind in cluster:
            raise ContextError("TF_CONFIG: 'chief' and 'master' are the same job")
        if not isinstance(addresses, list) or not all(
            isinstance(address, str) for address in addresses
        ):
            raise ContextError(f"TF_CONFIG: job {job!r} is not a list of addresses")
        cluster[kind] = tuple(addresses)
    if len(cluster.get("chief", ())) > 1:
        raise ContextError("TF_CONFIG: there can be only one chief")
    return cluster


def _task(task: object, cluster: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise ContextError("TF_CONFIG: 'task' has no 'type'")
    kind = "chief" if task["type"] == "master" else task["type"]
    index = task.get("index", 0)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ContextError(f"TF_CONFIG: the task's index {index!r} is not 0, 1, ...")
    count = len(cluster.get(kind, ()))
    if kind not in _OUTSIDE_TYPES and cluster and index >= count:
        raise ContextError(
            f"TF_CONFIG: there is no {kind}:{index}, the cluster has {count} {kind} "
            "tasks"
        )
    return kind, index


def _rank_info(
    env: Mapping[str, str],
    task_type: str,
    index: int,
    cluster: Mapping[str, tuple[str, ...]],
) -> RankInfo | None:
    if task_type in _SERVING_TYPES:
        return None
    if task_type not in RANKED_TYPES:
        return ALONE
    hosts = [_host(address) for address in rank_addresses(cluster)]
    if not hosts and "TFCLUSTER_RANK" not in env:
        return rank_info_from(env)
    size = number(env, "TFCLUSTER_SIZE", default=len(hosts) or None, at_least=1)
    if hosts and size != len(hosts):
        raise ContextError(
            f"TFCLUSTER_SIZE is {size}, but TF_CONFIG has {len(hosts)} chief and "
            "worker tasks"
        )
    before = len(cluster.get("chief", ())) if task_type == "worker" else 0
    rank = number(env, "TFCLUSTER_RANK", default=before + index, below=size)
    if hosts:
        rank_info = rank_info_among(hosts, rank)
    else:
        rank_info = RankInfo(rank=rank, size=size, cross_rank=rank, cross_size=size)
    # The launcher knows the hosts better: one host may have several addresses.
    local_size = number(env, "TFCLUSTER_LOCAL_SIZE", default=rank_info.local_size)
    cross_size = number(env, "TFCLUSTER_CROSS_SIZE", default=rank_info.cross_size)
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=number(
            env, "TFCLUSTER_LOCAL_RANK", default=rank_info.local_rank, below=local_size
        ),
        local_size=local_size,
        cross_rank=number(
            env, "TFCLUSTER_CROSS_RANK", default=rank_info.cross_rank, below=cross_size
        ),
        cross_size=cross_size,
    )


def _host(address: str) -> str:
    """``host:port`` without the port; IPv6 literals keep their brackets."""
    return address.rpartition(":")[0]


def _strategy(text: str) -> Strategy:
    try:
        return Strategy(text)
    except ValueError as error:
        names = ", ".join(map(str, Strategy))
        raise ContextError(
            f"TFCLUSTER_STRATEGY={text!r} is not one of {names}"
        ) from error


def _options(text: str, strategy: Strategy) -> Runtime:
    """The ``runtime:`` section; keys of other versions are ignored."""
    keys = {field.name for field in dataclasses.fields(Runtime)} - {"strategy"}
    settings = _object(text, "TFCLUSTER_RUNTIME")
    if "chief_only" in settings:
        settings["chief_only"] = tuple(settings["chief_only"])
    return Runtime(
        strategy=strategy, **{key: settings[key] for key in keys & settings.keys()}
    )


def _recording(text: str) -> Recording | None:
    if not text:
        return None
    settings = _object(text, "TFCLUSTER_RECORDING")
    try:
        return Recording(**settings)
    except TypeError as error:
        raise ContextError(f"TFCLUSTER_RECORDING: {error}") from error


def _token(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        # The text is a secret, so the message does not contain it.
        raise ContextError("TFCLUSTER_TOKEN is not hexadecimal") from error


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _filters(text: str) -> tuple[str, ...]:
    filters = _json(text, "TFCLUSTER_DEVICE_FILTERS")
    if not isinstance(filters, list) or not all(isinstance(f, str) for f in filters):
        raise ContextError("TFCLUSTER_DEVICE_FILTERS is not a list of device filters")
    return tuple(filters)


def _object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in a variable; {} if it is empty. Raises ContextError."""
    value = _json(text, name) if text else {}
    if not isinstance(value, dict):
        raise ContextError(f"{name} is not a JSON object")
    return value


def _json(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContextError(f"{name} is not JSON: {error}") from error

"""Which task runs on which host with which GPUs. Pure; keeps the order of the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import BUILT_IN_SERVERS, RANKED_TYPES
from tfcluster.plan.model import Allocation, Description, Host

Gpus = tuple[str, ...] | None
"""The value of CUDA_VISIBLE_DEVICES for a task; None: leave the host's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one task runs, with its rank, local rank and cross rank."""

    task: TaskId
    host: Host
    rank: int | None
    size: int
    """The number of ranks."""
    gpus: Gpus = None
    local_rank: int | None = None
    local_size: int = 0
    cross_rank: int | None = None
    """The host's index among the hosts that have a training task of this local rank."""
    cross_size: int = 0

    @property
    def gpus_of_machine(self) -> list[tuple[str, str]]:
        return [(self.host.machine_name, gpu) for gpu in self.gpus or ()]


def place(description: Description, allocation: Allocation) -> tuple[Place, ...]:
    """A place for every task, in listing order.

    Training tasks fill the hosts block by block in rank order: a host with a number of
    slots takes that many, and hosts without one get even blocks of the rest. With
    ``spread``, all hosts get even blocks, as far as their slots allow. The other tasks
    then fill the remaining slots in the same way.

    Raises StartError if there are too few slots or GPUs.
    """
    tasks, hosts = description.task_ids(), allocation.hosts
    ranked = [task for task in tasks if task.ranked]
    others = [task for task in tasks if not task.ranked]
    taken = [0] * len(hosts)
    host_of: dict[TaskId, Host] = {}
    shares = _spread if description.spread else _fill
    for kind in (ranked, others):
        queue = iter(kind)
        for index, share in enumerate(shares(len(kind), hosts, taken)):
            host_of |= dict.fromkeys(islice(queue, share), hosts[index])
            taken[index] += share
    if len(host_of) < len(tasks):
        raise _too_few_slots(description, allocation)
    rank_of = {task: rank for rank, task in enumerate(ranked)}
    places = [
        Place(task=task, host=host_of[task], rank=rank_of.get(task), size=len(ranked))
        for task in tasks
    ]
    return share_machines(description, places, allocation.more_gpus)


def place_again(
    description: Description, places: Sequence[Place], hosts: Container[str]
) -> tuple[Description, tuple[Place, ...]]:
    """The same cluster on ``hosts``, a subset, with as many tasks on each as before.

    The remaining training tasks are renumbered, chief first, so there are fewer
    workers; other tasks keep their names. Also returns the Description with the new
    number of workers. Raises StartError if there are too few GPUs.
    """
    left = [placed for placed in places if placed.host.name in hosts]
    workers = sum(p.task.ranked for p in left) - ("chief" in description.tasks)
    slots = Counter(placed.host.name for placed in left)
    full = {p.host.name: replace(p.host, slots=slots[p.host.name]) for p in left}
    return place_anew(description, left, [*full.values()], workers)


def place_anew(
    description: Description,
    places: Sequence[Place],
    hosts: Sequence[Host],
    workers: int,
) -> tuple[Description, tuple[Place, ...]]:
    """The same cluster with this number of ``workers`` on ``hosts``.

    The training tasks are placed as at a launch, with the slots and GPUs that other
    tasks leave; the other tasks keep their places. Also returns the Description with
    the new number. Raises StartError if there are too few slots or GPUs.
    """
    whole = {host.name: host for host in hosts}
    left = [placed for placed in places if placed.host.name in whole]
    whole |= {placed.host.name: placed.host for placed in left}
    others = [placed for placed in left if not placed.task.ranked]
    free = tuple(_without(host, others) for host in hosts)
    tasks = dict(description.tasks)
    if workers:
        tasks["worker"] = replace(tasks["worker"], count=workers)
    else:
        del tasks["worker"]
    changed = replace(description, tasks=tasks)
    ranked = {kind: tasks[kind] for kind in RANKED_TYPES if kind in tasks}
    training = place(replace(changed, tasks=ranked), Allocation(hosts=free))
    return changed, (
        *(replace(placed, host=whole[placed.host.name]) for placed in training),
        *others,
    )


def _without(host: Host, places: Sequence[Place]) -> Host:
    used = sum(placed.host.name == host.name for placed in places)
    taken = {gpu for placed in places for gpu in placed.gpus_of_machine}
    gpus = host.gpus and tuple(
        gpu for gpu in host.gpus if (host.machine_name, gpu) not in taken
    )
    slots = None if host.slots is None else max(0, host.slots - used)
    return replace(host, slots=slots, gpus=gpus)


def _fill(tasks: int, hosts: Sequence[Host], taken: Sequence[int]) -> list[int]:
    """How many of the tasks each host gets; ``taken`` are its slots in use."""
    free = [
        None if host.slots is None else host.slots - used
        for host, used in zip(hosts, taken, strict=True)
    ]
    rest = max(0, tasks - sum(slots for slots in free if slots is not None))
    even, remainder = divmod(rest, max(1, free.count(None)))
    shares: list[int] = []
    for slots in free:
        if slots is None:
            # The first hosts get the remainder.
            slots = even + (remainder > 0)
            remainder -= 1
        shares.append(min(slots, tasks - sum(shares)))
    return shares


def _spread(tasks: int, hosts: Sequence[Host], taken: Sequence[int]) -> list[int]:
    """Like ``_fill``, but each task counts for the host that has the fewest so far."""
    shares = [0] * len(hosts)
    queue = [(used, index) for index, used in enumerate(taken)]
    heapify(queue)
    while tasks and queue:
        used, index = heappop(queue)
        slots = hosts[index].slots
        if slots is None or used < slots:
            shares[index] += 1
            tasks -= 1
            heappush(queue, (used + 1, index))
    return shares


def _too_few_slots(description: Description, allocation: Allocation) -> StartError:
    wanted, hosts = len(description.task_ids()), allocation.hosts
    slots = sum(host.slots or 0 for host in hosts)
    listed = ", ".join(f"{host.name}: {host.slots}" for host in hosts[:8])
    more = ", ..." if len(hosts) > 8 else ""
    return StartError(
        f"{wanted} tasks need {wanted} slots, but the hosts have {slots} "
        f"({listed}{more})",
        hint=allocation.more_slots or "ask for more hosts or slots, or for fewer tasks",
    )


def share_machines(
    description: Description, places: Sequence[Place], more_gpus: str | None = None
) -> tuple[Place, ...]:
    """The same places, with GPU shares, local ranks and cross ranks by machine.

    Only running agents can say which GPUs and machine a host has. ``more_gpus`` is as
    in ``Allocation``. Raises StartError if there are too few GPUs.
    """
    by_machine: dict[str, list[Place]] = {}
    for placed in places:
        by_machine.setdefault(placed.host.machine_name, []).append(placed)
    peers: Counter[int | None] = Counter()
    """Local rank -> number of machines that have a training task of this local rank."""
    shared: dict[TaskId, Place] = {}
    for here in by_machine.values():
        tasks = [placed.task for placed in here]
        gpus = _gpu_shares(_with_all_gpus(here), tasks, description, more_gpus)
        ranked = [task for task in tasks if task.ranked]
        local_ranks = {task: local_rank for local_rank, task in enumerate(ranked)}
        for placed in here:
            local_rank = local_ranks.get(placed.task)
            shared[placed.task] = replace(
                placed,
                gpus=gpus[placed.task],
                local_rank=local_rank,
                local_size=len(ranked),
                cross_rank=None if local_rank is None else peers[local_rank],
            )
        peers.update(local_ranks.values())
    return tuple(
        replace(shared[task], cross_size=peers[shared[task].local_rank])
        for task in (placed.task for placed in places)
    )


def _with_all_gpus(places: Sequence[Place]) -> Host:
    """The machine under its first name, with the GPUs known under any of its names."""
    hosts = [placed.host for placed in places]
    known_gpus = [host.gpus for host in hosts if host.gpus is not None]
    gpus = tuple(dict.fromkeys(gpu for gpus in known_gpus for gpu in gpus))
    return replace(hosts[0], gpus=gpus if known_gpus else None)


def _gpu_shares(
    host: Host, tasks: Sequence[TaskId], description: Description, more_gpus: str | None
) -> dict[TaskId, Gpus]:
    """A share of the host's GPUs for each of its tasks.

    Tasks with a configured number get that many. The others divide the rest evenly, or
    share GPUs in turn if there are fewer GPUs than tasks. Built-in servers get none
    unless configured.
    """
    fixed: dict[TaskId, int] = {}
    for task in tasks:
        wanted = description.tasks[task.type].gpus
        if wanted is not None or task.type in BUILT_IN_SERVERS:
            fixed[task] = wanted or 0
    even = [task for task in tasks if task not in fixed]
    needed = sum(fixed.values())
    if host.gpus is None:
        if needed:
            raise StartError(
                f"{host.name}: its tasks need {needed} GPUs, but its GPUs are unknown",
                hint=more_gpus or "give the host 'gpus: N' under 'hosts'",
            )
        return {task: () if task in fixed else None for task in tasks}
    if needed > len(host.gpus):
        written = _written(description, [task for task in fixed if fixed[task]])
        raise StartError(
            f"{host.name}: its tasks need {needed} GPUs, but it has {len(host.gpus)}",
            hint=f"lower 'gpus'{written} or place fewer tasks there",
        )
    gpus = iter(host.gpus)
    shares: dict[TaskId, Gpus] = {
        task: tuple(islice(gpus, wanted)) for task, wanted in fixed.items()
    }
    if not host.gpus:
        return shares | dict.fromkeys(even, None)
    return shares | dict(zip(even, _even_shares([*gpus], len(even)), strict=True))


def _even_shares(gpus: Sequence[str], tasks: int) -> list[tuple[str, ...]]:
    count = len(gpus)
    if 0 < count < tasks:
        return [(gpus[index % count],) for index in range(tasks)]
    return [
        tuple(gpus[index * count // tasks : (index + 1) * count // tasks])
        for index in range(tasks)
    ]


def _written(description: Description, tasks: Iterable[TaskId]) -> str:
    """Where the configuration sets these tasks' number of GPUs, for a message."""
    keys = dict.fromkeys(f"tasks.{task.type}.gpus" for task in tasks)
    places = [description.origins[key] for key in keys if key in description.origins]
    return f" ({', '.join(places)})" if places else ""

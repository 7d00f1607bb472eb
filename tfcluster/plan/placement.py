"""Which task runs on which host with which GPUs. Pure; keeps the order of the hosts.

Knows nothing about how hosts are allocated or how tasks are started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import BUILT_IN_SERVERS, RANKED_TYPES
from tfcluster.plan.model import Allocation, Description, Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one task runs, with its rank, local rank and cross rank."""

    task: TaskId
    host: Host
    rank: int | None
    local_rank: int | None
    local_size: int
    cross_rank: int | None
    """The host's index among the hosts that have a training task of this local rank."""
    cross_size: int
    gpus: tuple[str, ...] | None
    """The value of CUDA_VISIBLE_DEVICES; None: leave the host's value."""


def place(description: Description, allocation: Allocation) -> tuple[Place, ...]:
    """A place for every task, in listing order.

    Training tasks fill the hosts block by block in rank order: a host with a number of
    slots takes that many, and hosts without one get even blocks of the rest. With
    ``spread``, all hosts get even blocks, as far as their slots allow. The other tasks
    then fill the remaining slots in the same way.

    Raises StartError if there are too few slots or GPUs.
    """
    tasks = description.task_ids()
    ranked = [task for task in tasks if task.ranked]
    others = [task for task in tasks if not task.ranked]
    taken = [0] * len(allocation.hosts)
    fill = _spread if description.spread else _fill
    where = fill(ranked, allocation.hosts, taken)
    where.update(fill(others, allocation.hosts, taken))
    if len(where) < len(tasks):
        raise _too_few_slots(description, allocation)
    return _places(description, allocation, tasks, where)


def place_again(
    description: Description, places: Sequence[Place], hosts: Container[str]
) -> tuple[Description, tuple[Place, ...]]:
    """The same cluster on ``hosts``, a subset, with as many tasks on each as before.

    The remaining training tasks are renumbered, chief first, so there are fewer
    workers; other tasks keep their names. Also returns the Description with the new
    number of workers. Raises StartError if there are too few GPUs.
    """
    left = [each for each in places if each.host.name in hosts]
    training = [each for each in left if each.task.ranked]
    workers = len(training) - ("chief" in description.tasks)
    slots = Counter(each.host.name for each in training)
    used_hosts = {each.host.name: each.host for each in training}
    free = [replace(host, slots=slots[name]) for name, host in used_hosts.items()]
    return _place_training(description, left, free, workers)


def place_anew(
    description: Description,
    places: Sequence[Place],
    hosts: Sequence[Host],
    workers: int,
) -> tuple[Description, tuple[Place, ...]]:
    """The same cluster with this number of ``workers`` on ``hosts``.

    The training tasks are placed as at a launch, in the slots that other tasks leave;
    the other tasks keep their places. Also returns the Description with the new number.
    Raises StartError if there are too few slots or GPUs.
    """
    names = {host.name for host in hosts}
    left = [each for each in places if each.host.name in names]
    others = Counter(each.host.name for each in left if not each.task.ranked)
    free = [
        host
        if host.slots is None
        else replace(host, slots=max(0, host.slots - others[host.name]))
        for host in hosts
    ]
    return _place_training(description, left, free, workers)


def _place_training(
    description: Description,
    places: Sequence[Place],
    free: Sequence[Host],
    workers: int,
) -> tuple[Description, tuple[Place, ...]]:
    """Place the training tasks on ``free``, whose slots are free for them.

    The other tasks keep their places and their GPUs.
    """
    others = [each for each in places if not each.task.ranked]
    tasks = dict(description.tasks)
    if workers:
        tasks["worker"] = replace(tasks["worker"], count=workers)
    else:
        del tasks["worker"]
    taken = {gpu for each in others for gpu in each.gpus or ()}
    hosts = tuple(
        replace(
            host, gpus=host.gpus and tuple(gpu for gpu in host.gpus if gpu not in taken)
        )
        for host in free
    )
    changed = replace(description, tasks=tasks)
    ranked = {kind: tasks[kind] for kind in RANKED_TYPES if kind in tasks}
    again = place(replace(changed, tasks=ranked), Allocation(hosts=hosts))
    whole = {host.name: host for host in free}
    whole |= {each.host.name: each.host for each in places}
    again = tuple(replace(each, host=whole[each.host.name]) for each in again)
    return changed, (*again, *others)


def _fill(
    tasks: Sequence[TaskId], hosts: Sequence[Host], taken: list[int]
) -> dict[TaskId, int]:
    """The host's index for each task, as far as there are slots; updates ``taken``."""
    limited = sum(
        host.slots - used
        for host, used in zip(hosts, taken, strict=True)
        if host.slots is not None
    )
    open_hosts = sum(host.slots is None for host in hosts)
    rest = max(0, len(tasks) - limited)
    where: dict[TaskId, int] = {}
    queue = iter(tasks)
    opened = 0
    for index, host in enumerate(hosts):
        if host.slots is None:
            # Rounded up, so that the first hosts get the remainder.
            share = -(-rest * (opened + 1) // open_hosts) - -(
                -rest * opened // open_hosts
            )
            opened += 1
        else:
            share = host.slots - taken[index]
        for task in islice(queue, share):
            where[task] = index
            taken[index] += 1
    return where


def _spread(
    tasks: Sequence[TaskId], hosts: Sequence[Host], taken: list[int]
) -> dict[TaskId, int]:
    """Like ``_fill``, but each task counts for the host that has the fewest so far."""
    shares = [0] * len(hosts)
    free = [
        (used, index)
        for index, used in enumerate(taken)
        if (slots := hosts[index].slots) is None or used < slots
    ]
    heapify(free)
    for _ in tasks:
        if not free:
            break
        used, index = heappop(free)
        shares[index] += 1
        taken[index] = used + 1
        if (slots := hosts[index].slots) is None or used + 1 < slots:
            heappush(free, (used + 1, index))
    queue = iter(tasks)
    return {
        task: index
        for index, share in enumerate(shares)
        for task in islice(queue, share)
    }


def _too_few_slots(description: Description, allocation: Allocation) -> StartError:
    wanted, hosts = len(description.task_ids()), allocation.hosts
    slots = sum(host.slots or 0 for host in hosts)
    each = ", ".join(f"{host.name}: {host.slots}" for host in hosts[:8])
    more = ", ..." if len(hosts) > 8 else ""
    return StartError(
        f"{wanted} tasks need {wanted} slots, but the hosts have {slots} "
        f"({each}{more})",
        hint=allocation.more_slots or "ask for more hosts or slots, or for fewer tasks",
    )


def _places(
    description: Description,
    allocation: Allocation,
    tasks: Sequence[TaskId],
    where: Mapping[TaskId, int],
) -> tuple[Place, ...]:
    hosts = allocation.hosts
    on_host: list[list[TaskId]] = [[] for _ in hosts]
    for task in tasks:
        on_host[where[task]].append(task)
    gpus: dict[TaskId, tuple[str, ...] | None] = {}
    for host, here in zip(hosts, on_host, strict=True):
        gpus.update(_gpu_shares(host, here, description, allocation.more_gpus))
    numbers = _numbered(on_host)
    rank_of = {task: rank for rank, task in enumerate(t for t in tasks if t.ranked)}
    return tuple(
        Place(
            task=task,
            host=hosts[where[task]],
            rank=rank_of.get(task),
            gpus=gpus[task],
            local_rank=numbers[task].local_rank,
            local_size=numbers[task].local_size,
            cross_rank=numbers[task].cross_rank,
            cross_size=numbers[task].cross_size,
        )
        for task in tasks
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The fields with the same names in a Place."""

    local_rank: int | None
    local_size: int
    cross_rank: int | None
    cross_size: int


def _numbered(on_host: Sequence[Sequence[TaskId]]) -> dict[TaskId, _Numbers]:
    """Local and cross ranks and sizes of all tasks; ``on_host`` has a list per host."""
    ranked = [[task for task in here if task.ranked] for here in on_host]
    # Local rank -> hosts with a training task of that local rank -> their cross rank.
    peers: dict[int, dict[int, int]] = {}
    for index, here in enumerate(ranked):
        for local_rank in range(len(here)):
            members = peers.setdefault(local_rank, {})
            members[index] = len(members)
    numbers: dict[TaskId, _Numbers] = {}
    for index, tasks_here in enumerate(on_host):
        size = len(ranked[index])
        numbers |= dict.fromkeys(tasks_here, _Numbers(None, size, None, 0))
        for local, task in enumerate(ranked[index]):
            among = peers[local]
            numbers[task] = _Numbers(local, size, among[index], len(among))
    return numbers


def share_machines(
    description: Description,
    places: Sequence[Place],
    machines: Mapping[str, str],
    more_gpus: str | None = None,
) -> tuple[Place, ...]:
    """The same places, with GPU shares and local ranks computed per machine.

    Only running agents can say which GPUs a host has, and whether two host names are
    one machine. ``machines`` maps every name of such a machine to one of its names,
    ``more_gpus`` is as in ``Allocation``.
    Raises StartError if there are too few GPUs.
    """
    by_machine: dict[str, list[Place]] = {}
    for each in places:
        name = machines.get(each.host.name, each.host.name)
        by_machine.setdefault(name, []).append(each)
    shares: dict[TaskId, tuple[str, ...] | None] = {}
    for here in by_machine.values():
        tasks = [each.task for each in here]
        host = _with_all_gpus(here)
        shares |= _gpu_shares(host, tasks, description, more_gpus)
    found = tuple(replace(each, gpus=shares[each.task]) for each in places)
    if not machines:
        return found
    numbers = _numbered([[each.task for each in h] for h in by_machine.values()])
    return tuple(
        replace(
            each,
            local_rank=numbers[each.task].local_rank,
            local_size=numbers[each.task].local_size,
            cross_rank=numbers[each.task].cross_rank,
            cross_size=numbers[each.task].cross_size,
        )
        for each in found
    )


def _with_all_gpus(places: Sequence[Place]) -> Host:
    """The machine under its first name, with the GPUs known under any of its names."""
    hosts = [each.host for each in places]
    known = [host.gpus for host in hosts if host.gpus is not None]
    gpus = tuple(dict.fromkeys(gpu for found in known for gpu in found))
    return replace(hosts[0], gpus=gpus if known else None)


def _gpu_shares(
    host: Host,
    tasks: Iterable[TaskId],
    description: Description,
    more_gpus: str | None,
) -> dict[TaskId, tuple[str, ...] | None]:
    """A share of the host's GPUs for each of its tasks.

    Tasks with a configured number get that many. The others divide the rest evenly, or
    share GPUs in turn if there are fewer GPUs than tasks. Built-in servers get none
    unless configured.
    """
    shares: dict[TaskId, tuple[str, ...] | None] = {}
    fixed: list[tuple[TaskId, int]] = []
    even: list[TaskId] = []
    groups = description.tasks
    for task in tasks:
        wanted = groups[task.type].gpus
        if task.type in BUILT_IN_SERVERS and not wanted:
            shares[task] = ()
        elif wanted is not None:
            fixed.append((task, wanted))
        else:
            even.append(task)
    needed = sum(wanted for _, wanted in fixed)
    if host.gpus is None:
        if needed:
            raise StartError(
                f"{host.name}: its tasks need {needed} GPUs, but its GPUs are unknown",
                hint=more_gpus or "give the host 'gpus: N' under 'hosts'",
            )
        return shares | dict.fromkeys(even, None)
    if needed > len(host.gpus):
        raise StartError(
            f"{host.name}: its tasks need {needed} GPUs, but it has {len(host.gpus)}",
            hint=f"lower 'gpus'{_written(description, fixed)} or place fewer tasks "
            "there",
        )
    free = list(host.gpus)
    for task, wanted in fixed:
        shares[task], free = tuple(free[:wanted]), free[wanted:]
    for index, task in enumerate(even):
        if not host.gpus:
            shares[task] = None
        elif not free:
            shares[task] = ()
        elif len(free) < len(even):
            shares[task] = (free[index % len(free)],)
        else:
            low = index * len(free) // len(even)
            high = (index + 1) * len(free) // len(even)
            shares[task] = tuple(free[low:high])
    return shares


def _written(description: Description, tasks: Iterable[tuple[TaskId, object]]) -> str:
    """Where the configuration sets these tasks' number of GPUs, for a message."""
    keys = dict.fromkeys(f"tasks.{task.type}.gpus" for task, _ in tasks)
    places = [description.origins[key] for key in keys if key in description.origins]
    return f" ({', '.join(places)})" if places else ""

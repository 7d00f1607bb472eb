"""What `tfcluster resize` asks for, and why a run cannot be resized that way. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from tfcluster import schedulers
from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.base.vocabulary import RANKED_TYPES
from tfcluster.launcher.job import Job
from tfcluster.plan.host_patterns import host_name_problem
from tfcluster.plan.model import Host, Strategy
from tfcluster.protocol.commands import ResizeCommand

MOST_WORKERS = 100_000
_WITH_SERVERS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request that can be fulfilled."""

    workers: int
    hosts: tuple[Host, ...]
    """All hosts after the resize, in the order of the allocation; new ones last."""
    new: tuple[str, ...]
    """The hosts that must be prepared first."""
    job: Job
    """The job after the resize, as far as it is known before the resize."""


def plan_resize(
    job: Job,
    alive: Container[str],
    request: ResizeCommand,
) -> Wanted | list[str]:
    """The resize that a request leads to, or all reasons against it.

    ``alive`` has the hosts that are ready.
    """
    problems = list(_never(job))
    added = _added(job, alive, request, problems)
    by_name = {host.name: host for host in added}
    hosts = [
        by_name.pop(host.name, host)
        for host in job.allocation.hosts
        if host.name in alive or host.name in by_name
    ]
    hosts += by_name.values()
    workers = _workers(job, added, request, problems)
    if problems or workers is None:
        return problems
    if not added and workers == job.description.tasks["worker"].count:
        return [f"there are {workers} workers already"]
    names = {host.name for host in added}
    listed = {host.name for host in job.description.hosts}
    more = (host for host in added if host.name not in listed)
    description = replace(job.description, hosts=(*job.description.hosts, *more))
    try:
        after = replace(job, description=description).resized(hosts, workers)
    except StartError as error:
        return [error.sentence]
    idle = names - {host.name for host in after.used_hosts()}
    if idle:
        return [
            f"{', '.join(sorted(idle))}: no task would run there with {workers} workers"
        ]
    new = tuple(host.name for host in added)
    return Wanted(workers=workers, hosts=tuple(hosts), new=new, job=after)


def _never(job: Job) -> Iterator[str]:
    """Why this run cannot be resized at all."""
    strategy = job.description.runtime.strategy
    if strategy in _WITH_SERVERS or "ps" in job.description.tasks:
        yield f"a run with parameter servers cannot be resized (strategy {strategy})"
    elif job.plan().restart_alone:
        yield "its tasks do not restart together (restart.scope is task)"
    if "worker" not in job.description.tasks:
        yield "it has no workers"


def _added(
    job: Job,
    alive: Container[str],
    request: ResizeCommand,
    problems: list[str],
) -> list[Host]:
    scheduler = schedulers.get(job.description.backend)
    allocated = {host.name: host for host in job.allocation.hosts}
    used = {spec.place.host.name for spec in job.specs.values()}
    added: list[Host] = []
    for item in request.hosts:
        name, slots = item.host, item.slots
        if host_name_problem(name):
            problems.append(f"{name[:60]!r} is not a host name")
        elif slots is not None and not 0 < slots <= MOST_WORKERS:
            problems.append(f"{name}: {slots} is not a number of slots")
        elif scheduler.here:
            problems.append(f"{name}: backend {scheduler.name} has only this machine")
        elif name in used and name in alive:
            problems.append(f"{name} is a host of the run already")
        elif name not in allocated and not scheduler.lists_hosts:
            problems.append(f"{name}: the job does not have this host")
        elif any(name == host.name for host in added):
            problems.append(f"{name} is named twice")
        else:
            host = allocated.get(name) or Host(name=name)
            added.append(host if slots is None else replace(host, slots=slots))
    return added


def _workers(
    job: Job, added: Sequence[Host], request: ResizeCommand, problems: list[str]
) -> int | None:
    """The number of workers, or None with an entry in ``problems``."""
    group = job.description.tasks.get("worker")
    if group is None:
        return None
    workers = request.workers
    if workers is None:
        workers = group.count + sum(_share(job, host) for host in added)
    if not 1 <= workers <= MOST_WORKERS:
        problems.append(f"{workers} is not a number of workers")
        return None
    if group.min is not None and workers < group.min:
        problems.append(f"{workers} workers are fewer than 'min' ({group.min})")
    shards = job.description.runtime.shards
    ranks = workers + ("chief" in job.description.tasks)
    if shards is not None and ranks > shards:
        problems.append(f"{shards} shards are too few for {ranks} ranks")
    return workers


def _share(job: Job, host: Host) -> int:
    """How many workers a new host gets: its slots, or as many as the others have."""
    if host.slots is not None:
        return host.slots
    ranked = [spec for spec in job.specs.values() if spec.task.type in RANKED_TYPES]
    hosts = {spec.place.host.name for spec in ranked}
    return max(1, len(ranked) // max(1, len(hosts)))

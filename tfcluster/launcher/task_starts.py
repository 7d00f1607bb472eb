"""Starts tasks once their hosts are ready, and shows what is known by then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Mapping
from functools import cached_property

from tfcluster.base.errors import ExitCode, StartError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.task_id import TaskId
from tfcluster.launcher.host_facts import clock_warnings, machine_warnings, threads_env
from tfcluster.launcher.hosts import Hosts
from tfcluster.launcher.job import Job, is_awaited, search_paths, warm_env
from tfcluster.launcher.live_run import LiveRun
from tfcluster.lifecycle.events import Event, LauncherFault, TaskUnstartable
from tfcluster.plan.compose import Cluster, TaskSpec, address, cluster_of
from tfcluster.plan.document import plan_document, task_parts
from tfcluster.protocol.requests import Start
from tfcluster.protocol.wire import WireError
from tfcluster.record.files import replace_json


class TaskStarts:
    def __init__(self, run: LiveRun, hosts: Hosts, cold: Container[TaskId]) -> None:
        self._run = run
        self._hosts = hosts
        self._cold = cold
        self._is_new_plan = self._has_new_hosts = True
        """Whether the plan has changed since it was recorded, and has new hosts."""

    @property
    def _job(self) -> Job:
        return self._run.job

    @cached_property
    def _ports(self) -> dict[TaskId, int]:
        """The tasks' ports: known once all hosts are ready, held for all attempts."""
        return self._hosts.ports()

    def address(self, task: TaskId) -> str | None:
        spec = self._job.specs[task]
        return address(spec.place, self._ports.get(task)) if spec.needs_port else None

    def located(self, job: Job) -> Job:
        return job.located(self._hosts.located(job.allocation.hosts))

    def replanned(self, *, new_hosts: bool) -> None:
        """Note that the current job is another one than before."""
        del self._ports
        self._is_new_plan = True
        self._has_new_hosts = self._has_new_hosts or new_hosts

    def start(
        self, tasks: tuple[TaskId, ...], attempts: tuple[int, ...]
    ) -> list[Event]:
        """Start tasks; returns what the lifecycle must know of those that cannot."""
        hosts = self._hosts
        if not any(attempts):
            try:
                self._run.current.adopt(self.located(self._job))
            except StartError as error:
                return [LauncherFault(error.message, ExitCode.START)]
            for warning in machine_warnings(self._job.used_hosts()):
                self._run.say(warning)
            if any(spec.has_own_gpu for spec in self._job.specs.values()):
                choice = self._job.transport
                self._run.say(f"transport: {choice.transport}, because {choice.reason}")
        specs = [*self._job.specs.values()]
        cluster = cluster_of(specs, self._ports)
        try:
            cluster.require_fit(tasks)
        except StartError as error:
            return [TaskUnstartable(tasks[0], attempts[0], error.message)]
        if self._is_new_plan:
            self._is_new_plan = False
            self._record_plan(cluster)
        if self._has_new_hosts:
            self._has_new_hosts = False
            shares, show = self._hosts.facts.shares_files, self._run.show
            show.ports(self._job, self._ports)
            for warning in clock_warnings(self._hosts.clock_leads_s):
                self._run.say(warning)
            apart = [h for h in self._run.plan.hosts() if not shares(h)]
            show.places(self._job, apart, self._hosts.files.copies())
        closed = self._job.description.expose == "run"
        facts = _StartFacts(
            cluster=cluster,
            parameter_ports=hosts.parameter_ports(),
            threads=threads_env(specs, self._job.description.runtime.transport),
            peers=",".join(hosts.peers()) if closed else None,
        )
        now_s, events = time.monotonic(), list[Event]()
        for task, attempt in zip(tasks, attempts, strict=True):
            spec = self._job.specs[task]
            try:
                hosts.send(spec.place.host.name, self._request(spec, attempt, facts))
            except WireError as error:
                events.append(TaskUnstartable(task, attempt, str(error)))
                continue
            progress = self._run.progress
            progress.started(task, now_s, reports=spec.trains, attempt=attempt)
            # Starting hundreds of tasks may take longer than a lease on a busy machine.
            hosts.ping()
        return events

    def _record_plan(self, cluster: Cluster) -> None:
        job = self._job
        document = plan_document(
            job.description,
            job.allocation,
            (*job.specs.values(), *job.left_out.values()),
            logs=str(job.logs),
            ports=self._ports,
            transport=job.transport,
        )
        with contextlib.suppress(OSError):  # events have the addresses, too
            replace_json(self._run.paths.plan, task_parts(document, cluster))

    def _request(self, spec: TaskSpec, attempt: int, facts: _StartFacts) -> Start:
        job, hosts, task = self._job, self._hosts, spec.task
        host = spec.place.host.name
        package = hosts.facts.package(host)
        is_warm = hosts.is_warm(host, spec.warm) and task not in self._cold
        variables = {
            **warm_env(job, spec),
            **spec.own_env,
            "TF_CONFIG": facts.cluster.tf_config(task),
            "TFCLUSTER_DATA_SERVICE": job.data_service(self._ports),
            "TFCLUSTER_DATA_TASKS": job.data_tasks(),
            "TFCLUSTER_PARAMETER_SERVERS": job.parameter_servers(facts.parameter_ports),
            **({} if spec.place.rank is None else facts.threads),
            **_files_env(job, spec),
            "TFCLUSTER_ATTEMPT": str(attempt),
        }
        return Start(
            task=str(task),
            attempt=attempt,
            argv=tuple(spec.arguments if is_warm else spec.cold_argv(package)),
            env=variables,
            cwd=hosts.files.cwd(host, spec.cwd),
            log=job.log(task),
            port=self._ports.get(task),
            parameter_port=facts.parameter_ports.get(task),
            warm=spec.warm if is_warm else None,
            listens=is_awaited(spec),
            watched=job.may_listen(task),
            peers=facts.peers,
            prepend=search_paths(job, package),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartFacts:
    cluster: Cluster
    parameter_ports: Mapping[TaskId, int]
    """The second port of each ps that has one."""
    threads: Mapping[str, str | None]
    """The variables that say how many threads each rank uses."""
    peers: str | None
    """The networks from which others may connect; None: from everywhere."""


def _files_env(job: Job, spec: TaskSpec) -> dict[str, str]:
    """What a task has to know about the programs that may write the same files."""
    is_same = all(
        (rank.arguments, rank.cwd) == (spec.arguments, spec.cwd)
        for rank in job.specs.values()
        if rank.place.rank is not None
    )
    if not is_same or spec.arguments[:1] != ("run",):
        return {}
    if spec.task.type == "evaluator":
        return {"TFCLUSTER_SAME_PROGRAM": "1"}
    return {"TFCLUSTER_FILES": str(job.logs.with_name("files"))} if spec.trains else {}

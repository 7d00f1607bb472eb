"""The plan as data and as JSON, for ``plan``, ``--dry-run`` and ``plan.json``.

TF_CONFIG is by far the largest part and nearly the same for all tasks, so its text is
copied into each task's output without being parsed or built again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.plan.compose import Choice, Cluster, TaskSpec, address, chosen_transport
from tfcluster.plan.model import Allocation, Description, Requirements, Secret
from tfcluster.protocol.wire import WORKDIR

if TYPE_CHECKING:
    from tfcluster.documents.checks import (
        PlannedEnvironment,
        PlannedHost,
        SharedPlan,
        TaskEntry,
    )

Json = dict[str, Any]

_CREDENTIALS = re.compile(r"://(?!git@)[^/@\s]+@")


def plan_document(
    description: Description,
    allocation: Allocation,
    specs: Sequence[TaskSpec],
    *,
    logs: str,
    ports: Mapping[TaskId, int] | None = None,
    transport: Choice | None = None,
) -> SharedPlan:
    """The plan without TF_CONFIG, secrets masked; ``logs`` is the log folder."""
    hidden = {name: _hidden(secret) for name, secret in description.secrets.items()}
    tasks = [_task_json(spec, ports or {}, hidden, logs) for spec in specs]
    hosts: list[PlannedHost] = [
        {
            "host": host.name,
            "slots": host.slots,
            "gpus": None if host.gpus is None else len(host.gpus),
        }
        for host in allocation.hosts
    ]
    sync, setup = description.sync, description.setup
    requirements = description.requirements
    if transport is None:
        places = [spec.place for spec in specs]
        transport = chosen_transport(description.runtime, places)
    return {
        "schema": FORMAT_VERSION,
        "name": description.name,
        "backend": description.backend,
        "sync": None if sync is None else sync.folder,
        "setup": None if setup is None else list(setup.lines),
        "requirements": None
        if requirements is None
        else environment_json(requirements),
        "transport": {"name": transport.transport, "reason": transport.reason},
        "hosts": hosts,
        "tasks": tasks,
    }


def _task_json(
    spec: TaskSpec, ports: Mapping[TaskId, int], hidden: Mapping[str, str], logs: str
) -> TaskEntry:
    place, start = spec.place, "warm" if spec.warm else "exec"
    if spec.wrapped:
        start = "exec, runtime in every Python below it"
    return {
        "task": str(spec.task),
        "rank": place.rank,
        "host": place.host.name,
        "address": address(place, ports.get(spec.task)) if spec.needs_port else None,
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "env": {**spec.shared_env, **spec.own_env, **hidden},
        "device_filters": spec.device_filters,
        "log": f"{logs}/{spec.task.log_name}",
        "start": f"{start}, built-in server" if spec.server else start,
    }


def environment_json(requirements: Requirements) -> PlannedEnvironment:
    """What a plan shows about the packages, without passwords of indexes."""
    return {
        "file": requirements.file,
        "lines": [
            _CREDENTIALS.sub("://***@", line.replace(WORKDIR, "."))
            for _, text in requirements.files
            for line in text.splitlines()
        ],
        "system_site_packages": requirements.system_site_packages,
    }


def _hidden(secret: Secret) -> str:
    if secret.file is not None:
        return f"<secret from file {secret.file}>"
    return f"<secret from ${secret.env}>"


def plan_lines(
    document: SharedPlan, cluster: Cluster, tasks: Sequence[TaskId]
) -> Iterator[str]:
    """The output of ``plan --json`` in pieces; each task has its full ``tf_config``."""
    head = {key: value for key, value in document.items() if key != "tasks"}
    yield json.dumps(head)[:-1] + ', "tasks": ['
    comma = "\n"
    for entry, task in zip(document["tasks"], tasks, strict=True):
        tf_config = cluster.tf_config(task)
        yield f'{comma}{json.dumps(entry)[:-1]}, "tf_config": {tf_config}}}'
        comma = ",\n"
    yield "]}\n"


def task_parts(document: SharedPlan, cluster: Cluster) -> Json:
    return {**document, "cluster": {job: list(a) for job, a in cluster.jobs.items()}}

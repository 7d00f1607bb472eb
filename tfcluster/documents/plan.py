"""What ``plan`` prints."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from tfcluster.documents.json_schema import FormatVersion


class PlannedEnvironment(TypedDict):
    """The environment that is made on hosts that lack it."""

    file: Annotated[str, "The file of requirements, or a pyproject.toml."]
    lines: list[str]
    system_site_packages: Annotated[
        bool, "Whether it also has the packages of the Python that it is made from."
    ]


class PlannedTransport(TypedDict):
    """The transport between the ranks."""

    name: Annotated[
        str,
        "host, tensorflow or mpi; auto if it cannot be known before hosts have "
        "reported their GPUs.",
    ]
    reason: Annotated[str, "Why, for people."]


class PlannedHost(TypedDict):
    """A host of the allocation."""

    host: str
    slots: Annotated[int | None, "How many tasks it takes."]
    gpus: Annotated[int | None, "null: unknown."]


class TaskEntry(TypedDict):
    """A task, without the TF_CONFIG that all tasks share."""

    task: Annotated[str, "Such as worker:0."]
    rank: Annotated[int | None, "null: it has no rank."]
    host: str
    address: Annotated[
        str | None,
        "HOST:PORT, or HOST:auto while no port is known; null: it needs none.",
    ]
    argv: Annotated[list[str], "The command."]
    cwd: Annotated[str, "The working directory."]
    env: Annotated[dict[str, str], "Variables, with secrets masked."]
    device_filters: Annotated[list[str], "TensorFlow's device filters."]
    log: Annotated[str, "The file of its output."]
    start: Annotated[
        str,
        "How it is started: warm (forked from a process that has imported TensorFlow) "
        "or exec.",
    ]


class PlannedTask(TaskEntry):
    """A task as a launch would start it."""

    tf_config: Annotated[dict[str, Any], "TF_CONFIG, in TensorFlow's format."]


class PlanHead(TypedDict):
    """A plan without its tasks."""

    schema: FormatVersion
    name: Annotated[str, "The name of the run."]
    backend: Annotated[str, "local, ssh, slurm or another scheduler."]
    sync: Annotated[
        str | None, "The folder on the hosts to which the working directory is copied."
    ]
    setup: Annotated[list[str] | None, "The setup lines of each host."]
    requirements: PlannedEnvironment | None
    transport: PlannedTransport
    hosts: list[PlannedHost]


class SharedPlan(PlanHead):
    """A plan whose tasks share a TF_CONFIG."""

    tasks: list[TaskEntry]


class PlanDocument(PlanHead):
    """What a launch would start: tfcluster plan --json"""

    tasks: Annotated[list[PlannedTask], "In rank order, then the others."]

"""The types that ``Run.status`` returns: schemas/status.schema.json in Python."""

from __future__ import annotations

from typing import Literal, TypedDict

RunState = Literal[
    "starting", "running", "stopping", "succeeded", "failed", "stopped", "lost"
]
TaskState = Literal["pending"] | RunState


class Failure(TypedDict):
    """Why a task or a host failed."""

    task: str | None
    host: str | None
    exit_code: int | None
    signal: str | None
    cause: str
    log_tail: list[str]
    log: str | None


class Serving(TypedDict):
    """The counters of a ps."""

    applied: int
    dropped: int
    staleness_mean: float
    staleness_max: int
    bytes: int


class Fit(TypedDict):
    """Where a task is in Keras' ``fit``."""

    epoch: int
    epochs: int | None
    epoch_step: int | None
    epoch_steps: int | None


class Task(TypedDict):
    """One task."""

    task: str
    host: str | None
    address: str | None
    state: TaskState
    pid: int | None
    attempt: int
    exit_code: int | None
    signal: str | None
    step: int | None
    steps_per_s: float | None
    log: str | None
    wait_share: float | None
    serving: Serving | None
    phase: str | None
    cause: str | None
    seconds: float | None
    fit: Fit | None
    metrics: dict[str, float | None]
    left_s: float | None
    rss_bytes: int | None
    cpu_s: float | None


class Host(TypedDict):
    """One host."""

    host: str
    state: Literal["pending", "starting", "ready", "failed", "lost", "closed"]
    cause: str | None


class File(TypedDict):
    """Why a file did not come back."""

    path: str
    cause: str


class Results(TypedDict):
    """What came back from a host that does not share the workdir."""

    host: str
    state: Literal["fetched", "incomplete", "shared"]
    folder: str | None
    there: str | None
    files: int
    bytes: int
    fetched: int
    unchanged: int
    sent_bytes: int
    kept: list[File]
    growing: list[File]
    missed: list[File]
    missed_count: int
    cause: str | None


class Launcher(TypedDict):
    """The process that drives a run."""

    pid: int
    host: str


class Status(TypedDict):
    """The state of a run, as ``tfcluster status RUN --json`` prints it."""

    schema: int
    run: str
    name: str
    backend: str | None
    state: RunState
    exit_code: int | None
    started: str | None
    ended: str | None
    first_failure: Failure | None
    tasks: list[Task]
    reason: str | None
    unknown_since: str | None
    hosts: list[Host]
    secondary_failures: list[Failure]
    swept: int
    notes: list[str]
    launcher: Launcher | None
    results: list[Results]
    follows: str | None
    requeues: int
    requeued: bool
    continued_as: str | None

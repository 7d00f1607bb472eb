"""What ``status``, ``list``, ``fetch`` and ``stacks`` print about runs."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from tfcluster.documents.json_schema import FormatVersion, Pattern

RunState = Literal[
    "starting", "running", "stopping", "succeeded", "failed", "stopped", "lost"
]
HostState = Literal["pending", "starting", "ready", "failed", "lost", "closed"]
FetchState = Literal["fetched", "incomplete", "shared"]
TaskState = RunState | Literal["pending"]
UtcTime = Annotated[str, Pattern(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class TaskFailure(TypedDict):
    """Why a task or a host failed."""

    task: Annotated[str | None, "The task, such as worker:1; null if a host failed."]
    host: str | None
    exit_code: Annotated[int | None, "The program's own exit code."]
    signal: Annotated[str | None, "Such as SIGKILL."]
    cause: Annotated[str, "One sentence."]
    log_tail: Annotated[list[str], "The last lines of the task's output."]
    log: Annotated[str | None, "The file of the task's output."]


class PsCounters(TypedDict):
    """The counters of a ps."""

    applied: Annotated[int, "Updates of its variables."]
    dropped: Annotated[int, "Gradients that came too late to be used."]
    staleness_mean: Annotated[
        float, "How many updates gradients were out of date, on average."
    ]
    staleness_max: Annotated[
        int, "How many updates gradients were out of date, at most."
    ]
    bytes: Annotated[int, "The size of its variables, with those of optimizers."]


class FitProgress(TypedDict):
    """Where a task is in Keras' ``fit``."""

    epoch: Annotated[int, "Counted from 1."]
    epochs: Annotated[int | None, "How many epochs `fit` has."]
    epoch_step: Annotated[int | None, "Steps of this epoch that have ended."]
    epoch_steps: Annotated[int | None, "How many steps an epoch has."]


class TaskReport(TypedDict):
    """The state of a task."""

    task: Annotated[str, "Such as worker:0."]
    host: str | None
    address: Annotated[str | None, "HOST:PORT, as in TF_CONFIG."]
    state: TaskState
    pid: int | None
    attempt: Annotated[int, "How often it was restarted."]
    exit_code: int | None
    signal: Annotated[str | None, "The signal that ended it, such as SIGKILL."]
    step: Annotated[int | None, "Training steps that have ended."]
    steps_per_s: float | None
    log: Annotated[str | None, "The file of its output."]
    wait_share: Annotated[
        float | None,
        "The share of its time, from 0 to 1, that it waits for other tasks.",
    ]
    serving: PsCounters | None
    phase: Annotated[str | None, "What it does before it trains."]
    cause: Annotated[str | None, "Why it ended, if it failed."]
    seconds: Annotated[float | None, "For how long it ran."]
    fit: Annotated[
        FitProgress | None, "Where it is in Keras' `fit`; null outside of it."
    ]
    metrics: Annotated[
        dict[str, float | None],
        "Losses and metrics of this epoch so far, by name; null: not a finite number.",
    ]
    left_s: Annotated[
        float | None, "The seconds until `fit` ends at this speed, without validation."
    ]
    rss_bytes: Annotated[int | None, "Resident memory of its processes."]
    cpu_s: Annotated[float | None, "CPU time of its processes."]


class HostStatus(TypedDict):
    """The state of a host."""

    host: str
    state: HostState
    cause: str | None


class FileCause(TypedDict):
    """Why a file did not come back."""

    path: str
    cause: str


class FetchedResults(TypedDict):
    """The last fetch of files from a host that does not share the workdir."""

    host: str
    state: Annotated[
        FetchState, "shared: the host has the same folder, so nothing is fetched."
    ]
    folder: Annotated[str | None, "The folder that the files came to."]
    there: Annotated[str | None, "The folder on the host."]
    files: Annotated[int, "How many files match."]
    bytes: Annotated[int, "Their size."]
    fetched: Annotated[int, "Files that were sent."]
    unchanged: Annotated[int, "Files that were already here."]
    sent_bytes: int
    kept: Annotated[list[FileCause], "Files here that were not replaced."]
    growing: Annotated[list[FileCause], "Files that changed while they were sent."]
    missed: Annotated[
        list[FileCause], "The first of the files that could not be fetched."
    ]
    missed_count: Annotated[int, "How many files could not be fetched."]
    cause: Annotated[str | None, "Why the fetch ended early."]


class LauncherProcess(TypedDict):
    """The process that drives a run."""

    pid: int
    host: str


class RunHead(TypedDict):
    """What is known of each run."""

    run: Annotated[str, "The run id."]
    name: str
    backend: Annotated[str | None, "local, ssh, slurm or another scheduler."]
    state: RunState
    exit_code: Annotated[
        int | None, "The exit code of `tfcluster launch`; null until the run is over."
    ]
    started: Annotated[UtcTime | None, "In UTC."]
    ended: Annotated[UtcTime | None, "In UTC."]
    reason: Annotated[str | None, "Why it is in this state, in one sentence."]


class Status(RunHead):
    """The state of a run: tfcluster status RUN --json"""

    schema: FormatVersion
    first_failure: TaskFailure | None
    tasks: Annotated[list[TaskReport], "In rank order, then the others."]
    unknown_since: Annotated[
        UtcTime | None,
        "The time since which this host does not know whether the run continues.",
    ]
    hosts: list[HostStatus]
    secondary_failures: Annotated[
        list[TaskFailure], "Further failures, mostly consequences of the first one."
    ]
    swept: Annotated[int, "Leftover processes that were ended."]
    notes: Annotated[list[str], "Messages to the user."]
    launcher: Annotated[LauncherProcess | None, "The process that drives the run."]
    results: Annotated[
        list[FetchedResults], "What came back from hosts that do not share the workdir."
    ]
    follows: Annotated[
        str | None, "The run that it continues, because its job was started again."
    ]
    requeues: Annotated[
        int, "How often its job had been requeued after the time limit before it began."
    ]
    requeued: Annotated[
        bool, "After its end, its job was requeued because of the time limit."
    ]
    continued_as: Annotated[str | None, "The run that continues it."]


class StatusOfAll(TypedDict):
    """All runs, newest first: tfcluster status --json"""

    schema: FormatVersion
    runs: list[Status]


class EndedStatus(Status):
    """How a run ended: the standard input of on_end"""

    folder: Annotated[str, "The folder of the run's record."]


class ListedRun(RunHead):
    """A run in a list."""

    folder: Annotated[str, "The folder of the run's record."]


class RunList(TypedDict):
    """Runs, newest first: tfcluster list --json"""

    schema: FormatVersion
    runs: list[ListedRun]


class FetchReport(TypedDict):
    """What came back from hosts: tfcluster fetch RUN --json"""

    schema: FormatVersion
    run: Annotated[str, "The run id."]
    folder: Annotated[str, "The folder that the files came to."]
    hosts: list[FetchedResults]


# "for" is a keyword of Python.
RankWait = TypedDict(
    "RankWait",
    {
        "since_s": Annotated[float, "For how many seconds it waits."],
        "what": Annotated[str, "What it waits in."],
        "for": Annotated[list[int], "The ranks that it waits for."],
    },
    total=False,
)


class TaskStack(TypedDict):
    """Where a task is in its Python code."""

    task: str
    stack: Annotated[str | None, "The stacks of its threads."]
    waiting: Annotated[RankWait | None, "What it waits for in an exchange of ranks."]


class StackReport(TypedDict):
    """Where tasks are in their Python code: tfcluster stacks --json"""

    schema: FormatVersion
    run: Annotated[str, "The run id."]
    tasks: list[TaskStack]
    silent: Annotated[list[str], "Tasks that did not answer."]

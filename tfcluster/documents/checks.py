"""What ``plan``, ``doctor``, ``explain`` and ``verify`` print."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

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


class UnknownFact(TypedDict):
    """A fact that could not be found out."""

    error: Annotated[str, "Why this could not be found out."]


class GpuFact(TypedDict):
    """A GPU of a host."""

    name: str
    used_mib: Annotated[int, "MiB of memory in use."]


class ImportTrial(TypedDict, total=False):
    """An import of TensorFlow."""

    seconds: Annotated[float, "How long importing TensorFlow took."]
    error: Annotated[str, "The last line of its error."]


# "import" is a keyword of Python.
HostFacts = TypedDict(
    "HostFacts",
    {
        "clock": Annotated[float | UnknownFact, "Seconds since the epoch."],
        "python": Annotated[str | UnknownFact, "The version."],
        "executable": Annotated[str | UnknownFact, "The interpreter."],
        "marked": Annotated[
            bool | UnknownFact,
            "Whether TFCLUSTER_RUN reaches Python: a command that starts it may remove "
            "variables.",
        ],
        "packages": Annotated[
            dict[str, str | None], "Installed versions; null: not installed."
        ],
        "peers": Annotated[
            dict[str, str], "For each other host, `reached` or why not."
        ],
        "gpus": list[GpuFact] | UnknownFact,
        "files": Annotated[
            dict[str, bool | str], "Whether these files and folders exist."
        ],
        "disks": Annotated[
            dict[str, int | str], "Free bytes in folders that a run writes to."
        ],
        "limits": Annotated[dict[str, int | str], "Soft limits; -1: unlimited."],
        "import": ImportTrial,
    },
    total=False,
)


class HostReport(TypedDict):
    """What was found on a host."""

    host: str
    address: str | None
    error: Annotated[str | None, "Why there are no facts about it."]
    clock_error_s: Annotated[
        float | None, "How far its clock is ahead for certain, in seconds."
    ]
    facts: Annotated[HostFacts, "What was found, as far as known."]


class HostFinding(TypedDict):
    """A problem of a host."""

    host: str
    text: Annotated[str, "The problem."]
    error: Annotated[bool, "A launch would fail because of it."]


class Diagnosis(TypedDict):
    """What was found on the hosts: tfcluster doctor --json"""

    schema: FormatVersion
    hosts: list[HostReport]
    findings: list[HostFinding]


class ExchangedTensor(TypedDict):
    """A tensor that the ranks exchange."""

    kind: Annotated[
        Literal["rows", "sum", "max", "min"],
        "rows: each rank has its rows; else what the ranks' terms are reduced by.",
    ]
    name: Annotated[str, "The name of the node that computes the tensor."]
    bytes: Annotated[
        int,
        "Of the whole tensor, per call of the function; 0 if its size is not known.",
    ]
    wanted_by: Annotated[str, "The type of an op that needs it whole, or result."]
    line: Annotated[
        str | None,
        "FILE:LINE:FUNCTION in the script: what needs the rows, or has computed the "
        "terms.",
    ]


class WholeOps(TypedDict):
    """Ops of a line that every rank computes whole."""

    op: Annotated[str, "The type of the ops."]
    count: Annotated[int, "How many there are in this line."]
    cost: Annotated[int, "Their own work."]
    following_cost: Annotated[
        int, "The work of ops that are whole only because they follow these."
    ]
    reason: str
    line: Annotated[str | None, "FILE:LINE:FUNCTION in the script."]


class ExplainedPipeline(TypedDict):
    """A tf.data pipeline from which a function takes its batches."""

    divided: Annotated[bool, "Whether each rank computes its own rows only."]
    reason: Annotated[
        str | None,
        "Why every rank computes whole batches, or what else is to be known of it.",
    ]


class ExplainedLoop(ExplainedPipeline):
    """A tf.data pipeline over which Python iterates, itself."""

    line: Annotated[str | None, "Where it begins to."]


class ExplainedFunction(TypedDict):
    """A function of a program."""

    name: str
    trains: Annotated[bool, "Whether it computes gradients."]
    rows: Annotated[
        int | None, "The rows of the batch; null if there is nothing to divide."
    ]
    cost: Annotated[int, "All work: multiply-adds of products, else numbers."]
    divided_share: Annotated[
        float, "The part of the work that the ranks divide, 0 to 1."
    ]
    exchanges: Annotated[int, "Per call of the function."]
    exchanged_bytes: Annotated[int, "Per call of the function."]
    exchanged: Annotated[list[ExchangedTensor], "The largest first."]
    whole: Annotated[
        list[WholeOps],
        "Ops that every rank computes whole though their inputs have rows, the most "
        "costly first.",
    ]
    pipelines: Annotated[
        list[ExplainedPipeline], "The datasets that it reads batch by batch."
    ]
    assigned: Annotated[
        list[str], "What a rank holds of its variables with runtime.shard_optimizer."
    ]
    error: Annotated[str | None, "Why the function could not be divided at all."]


class Explanation(TypedDict):
    """How a program would be divided among ranks: tfcluster explain --json"""

    schema: FormatVersion
    ranks: Annotated[int, "How many ranks were asked for."]
    mostly_whole: Annotated[
        str | None, "A sentence if most of the work is not divided."
    ]
    functions: Annotated[list[ExplainedFunction], "The most costly first."]
    loops: Annotated[
        list[ExplainedLoop], "The datasets over which Python iterates, itself."
    ]


QuantityKind = Literal[
    "learning_rate",
    "weight",
    "state",
    "slot",
    "logs",
    "run",
    "course",
    "file",
    "printed",
]


class ComparedKind(TypedDict):
    """The values of one kind."""

    values: Annotated[int, "How many."]
    largest: Annotated[
        float | None, "The largest relative difference; null if it is not finite."
    ]
    of_noise: Annotated[
        float | None, "The largest difference, divided by the noise of its value."
    ]


class FirstDifference(TypedDict):
    """The first value that differs."""

    step: Annotated[
        int,
        "The number of steps before it; 0: before the first step ended; -1: at the "
        "end.",
    ]
    kind: QuantityKind
    name: Annotated[str, "What differs."]
    alone: Annotated[float | None, "The value alone, of the element that differs most."]
    ranks: Annotated[float | None, "The value on the ranks."]
    relative: Annotated[
        float | None, "The difference, relative to the largest value of the array."
    ]
    of_noise: Annotated[
        float | None,
        "The difference, divided by the noise of one process; null if it has none.",
    ]
    factor: Annotated[
        float | None,
        "The change on the ranks divided by the change alone, if equal everywhere.",
    ]
    text: Annotated[str, "All of this in words."]


class FailedTrial(TypedDict):
    """Why a run that was to be compared failed."""

    reason: Annotated[str, "One sentence."]
    tail: Annotated[list[str], "The last lines of the task's output."]
    refused: Annotated[
        bool, "tfcluster ended it because its result would have differed."
    ]
    task: Annotated[str, "The task that failed first; empty if unknown."]
    hint: Annotated[str, "What to do next; may be empty."]


class Verification(TypedDict):
    """Whether ranks compute what one process computes: tfcluster verify --json"""

    schema: FormatVersion
    equal: bool
    ranks: Annotated[int, "How many ranks were compared."]
    strategy: Annotated[str, "As runtime.strategy."]
    of_noise: Annotated[
        float | None,
        "The largest difference, divided by the noise of its value; above 1 it is a "
        "difference. null if nothing was compared, or if it is not finite.",
    ]
    tolerance: Annotated[
        float | None,
        "The least noise: no smaller relative difference counts; null if a run failed.",
    ]
    tolerance_reason: str | None
    compared_with: Annotated[str, "one process, or what took its place."]
    by_chance: Annotated[
        str | None, "Why another run may differ, although this one is equal."
    ]
    not_compared: Annotated[list[str], "What could not be compared."]
    steps: Annotated[int, "How many steps were compared."]
    to_the_end: Annotated[bool, "The program ran to its end."]
    largest_difference: Annotated[
        float | None, "Relative; null if nothing was compared, or if it is not finite."
    ]
    compared: Annotated[dict[str, ComparedKind], "The compared values by their kind."]
    first_difference: FirstDifference | None
    causes: Annotated[list[str], "Likely causes of the difference."]
    failed_alone: FailedTrial | None
    failed_on_ranks: FailedTrial | None

"""The shape of cluster.yaml: its keys, their types and their meaning.

``tfcluster schema`` prints the descriptions. ``rules`` checks combinations of keys, and
``describe`` turns them into a Description.
"""

from __future__ import annotations

from tfcluster.config import field_types as kinds
from tfcluster.config.shape import (
    ListShape,
    MapOf,
    Nested,
    Section,
    key,
    optional,
    required,
)
from tfcluster.plan.model import PortRange, Strategy


class SecretSource(Section):
    """Where the value of a secret comes from: a file or a variable."""

    file: str | None = optional(kinds.LINE, "A file that only its owner may read.")
    env: str | None = optional(kinds.ENV_NAME, "A variable where tfcluster is started.")


class TaskSection(Section, shorthand="count"):
    """All tasks of one type. A plain number is their count."""

    count: int = key(kinds.COUNT, 1, "How many tasks of this type.")
    gpus: int | None = optional(
        kinds.GPUS, "GPUs for each task. Default: a share of its host's GPUs."
    )
    env: dict[str, str] = key(
        kinds.ENV, {}, "Variables for these tasks; they override those of all tasks."
    )
    command: list[str] | None = optional(
        kinds.COMMAND, "What these tasks run instead of `command`."
    )
    server: bool = key(
        kinds.FLAG,
        False,
        "A built-in TensorFlow server runs instead of the command (chief and worker "
        "only).",
    )
    min: int | None = optional(
        kinds.COUNT,
        "worker: minimum number for a restart after a host is lost. Default: all of "
        "them.",
    )


_GROUP = Nested(TaskSection)


class ResultsSection(Section, shorthand="patterns"):
    """Files that come back from hosts that do not share the workdir. A plain list is
    `patterns`."""

    patterns: list[str] = required(
        ListShape(kinds.LINE),
        "Names or paths, with * and ? (`*.keras`); one that ends in a slash is a "
        "folder (`logs/`).",
    )
    all: bool = key(
        kinds.FLAG,
        False,
        "From every host, into `results-by-host/HOST`. Otherwise from the chief's "
        "host, to where they were written.",
    )


class Workdir(Section, shorthand="path"):
    """Where tasks run. A plain path is `path`."""

    path: str | None = optional(
        kinds.LINE, "Relative to this file. Default: its folder."
    )
    sync: str | None = optional(
        kinds.LINE,
        "A folder on the hosts, relative to the home there: hosts that do not share "
        "`path` get a copy of its files in it.",
    )
    exclude: list[str] = key(
        ListShape(kinds.LINE),
        [],
        "Files that are not copied: names or paths, with * and ? (`*.ckpt`).",
    )
    results: ResultsSection | None = optional(
        Nested(ResultsSection),
        "Files of the tasks that come back from hosts that do not share `path`.",
    )


class TasksSection(Section):
    """The tasks of the cluster."""

    chief: TaskSection | None = optional(
        _GROUP, "Rank 0; left out, worker 0 is the chief."
    )
    worker: TaskSection | None = optional(_GROUP, "Tasks that train together.")
    ps: TaskSection | None = optional(_GROUP, "Parameter servers, built in.")
    evaluator: TaskSection | None = optional(
        _GROUP, "Runs the command outside the training cluster."
    )
    data: TaskSection | None = optional(_GROUP, "tf.data service, built in.")


class Trace(Section, shorthand="enabled"):
    """What `tfcluster trace` shows of the tasks. A plain true or false is `enabled`."""

    enabled: bool = key(kinds.FLAG, True, "The tasks record their steps and exchanges.")
    steps: int | None = optional(
        kinds.whole(1, 10**9),
        "Record only the first steps, this many. Default: all; the newest are kept.",
    )


class RuntimeSection(Section):
    """How the tasks work together."""

    strategy: str | None = optional(
        kinds.words(*map(str, Strategy)),
        "Default: parameter_server with ps tasks, else collective. none sets "
        "TF_CONFIG and leaves the script alone.",
    )
    transport: str = key(
        kinds.words("auto", "host", "tensorflow", "mpi"),
        "auto",
        "Transport of the exchanges between ranks.",
    )
    bucket_mb: float = key(
        kinds.number(above=0, most=4096),
        25.0,
        "Gradients are exchanged in buckets of this size (MB).",
    )
    compression: str = key(
        kinds.words("none", "fp16", "bf16"),
        "none",
        "Data type in which gradients are sent between hosts.",
    )
    error_feedback: bool = key(
        kinds.FLAG,
        False,
        "Add what compression removes from a gradient to the next one.",
    )
    batch: str = key(
        kinds.words("global", "per_worker"),
        "global",
        "Whether the script's batch size is that of all tasks together or of each.",
    )
    shards: int | None = optional(
        kinds.whole(2, 256),
        "Divide every batch into this many parts, computed and added up in the same "
        "way on any number of ranks, so that all get the same bits.",
    )
    shard_tables: int | None = key(
        kinds.SIZE_OR_OFF,
        "off",
        "Divide weights that are larger than this, such as tables of embeddings, by "
        "rows over the ranks, with the optimizer's variables for them.",
    )
    shard_optimizer: bool = key(
        kinds.FLAG,
        False,
        "Divide the optimizers' variables, such as Adam's moments, among the tasks: "
        "each holds and updates its piece.",
    )
    data: str = key(
        kinds.words("shared", "seed_offset"),
        "shared",
        "Whether the tasks divide one shuffled order of the data, or each shuffles "
        "all of it with its own seeds.",
    )
    sync_every: int | None = optional(
        kinds.whole(1, 10**9), "local_sgd: steps between averagings; default 100."
    )
    sync_seconds: float | None = optional(
        kinds.number(above=0, most=86400),
        "local_sgd: seconds between averagings, instead of steps.",
    )
    synchronous: bool = key(
        kinds.FLAG, False, "parameter_server: wait for every worker's gradient."
    )
    chief_only: list[str] = key(
        ListShape(kinds.words("print", "summary")),
        ["summary"],
        "What only the chief does: print() to the console, event files of tf.summary.",
    )
    files: str = key(
        kinds.words("auto", "private", "shared"),
        "auto",
        "Whether files that tasks other than the chief write are seen by these tasks "
        "only.",
    )
    warm_start: bool = key(
        kinds.FLAG, True, "Import TensorFlow once on each host and fork tasks from it."
    )
    stall_warning: float | None = key(
        kinds.DURATION_OR_OFF,
        "60s",
        "If others wait this long for a rank, it is named, with its stack.",
    )
    stall_timeout: float | None = key(
        kinds.DURATION_OR_OFF,
        "30m",
        "Ranks that have waited this long for another rank fail with an error.",
    )
    require_exchange: bool = key(
        kinds.FLAG,
        True,
        "A training task that exchanges nothing with the others counts as failed; "
        "false: for scripts that train nothing.",
    )
    trace: Trace = key(
        Nested(Trace), False, "Record every step and exchange, for `tfcluster trace`."
    )


class HostItem(Section, shorthand="host"):
    """One host, or several alike in hostlist syntax. Plain text is the name."""

    host: str = required(kinds.LINE, "A name, or several: node[01-04,7].")
    slots: int | None = optional(kinds.COUNT, "Number of tasks that run on it.")
    gpus: int | None = optional(
        kinds.GPUS, "Number of its GPUs. Default: the host reports it."
    )
    address: str | None = optional(kinds.LINE, "Address at which other hosts reach it.")
    user: str | None = optional(kinds.USER, "User name for ssh.")
    port: int | None = optional(kinds.PORT, "Port of its sshd.")
    python: tuple[str, ...] | None = optional(
        kinds.INTERPRETER, "Its Python interpreter, or a command."
    )


class SshSection(Section):
    """How hosts are reached over SSH. ~/.ssh/config is also read."""

    user: str | None = optional(kinds.USER, "User name on the hosts.")
    port: int | None = optional(kinds.PORT, "Port of the sshd.")
    identity_file: str | None = optional(kinds.LINE, "Private key.")
    config_file: str | None = optional(kinds.LINE, "Client configuration to use.")
    known_hosts: str | None = optional(kinds.LINE, "Host keys to trust.")
    connect_timeout: float = key(
        kinds.DURATION, "10s", "How long one connection may take."
    )


class RestartSection(Section):
    """What happens after a failure."""

    max: int = key(kinds.whole(0, kinds.MAX_COUNT), 0, "Maximum number of restarts.")
    scope: str = key(
        kinds.words("auto", "job", "task"),
        "auto",
        "Whether all tasks restart or only the failed one.",
    )
    within: float | None = key(
        kinds.DURATION_OR_OFF,
        False,
        "`max` counts the restarts within this time; off: of the whole run.",
        shown="off",
    )
    backoff: float = key(
        kinds.DURATION_OR_ZERO,
        "0s",
        "How long the first restart waits; each further one waits twice as long.",
    )
    on_time_limit: str = key(
        kinds.words("stop", "requeue"),
        "stop",
        "slurm: what happens when the time limit of the job is near. requeue: the "
        "tasks are stopped, and the job is queued again; that counts as a restart.",
    )


class PortsSection(Section, shorthand="range"):
    """The ports of the tasks. Plain text is `range`."""

    range: PortRange | None = key(
        kinds.PORTS, "auto", "auto, or the ports to use: 40000-41000."
    )
    expose: str = key(
        kinds.words("run", "any"),
        "run",
        "Who can connect to TensorFlow's servers: the hosts of the run, or any "
        "machine.",
    )


class RequirementsSection(Section, shorthand="file"):
    """An environment that is made on hosts that lack it. Plain text is the file."""

    file: str = required(kinds.LINE, "A requirements.txt or a pyproject.toml.")
    system_site_packages: bool = key(
        kinds.FLAG, False, "The packages of the interpreter below are visible, too."
    )


class ClusterSection(Section):
    """A TensorFlow cluster and what runs on it, as `tfcluster launch` reads it."""

    name: str | None = optional(
        kinds.NAME,
        "Only one active run can have it. Default: the file's stem, which several "
        "runs can share.",
    )
    backend: str = key(kinds.WORD, "local", "Where the hosts come from.")
    command: list[str] | None = optional(
        kinds.COMMAND,
        "The command of every task: a list, or a string that is split as a POSIX "
        "shell would, but no shell runs it.",
    )
    workdir: Workdir = key(
        Nested(Workdir),
        {},
        "Where tasks run, relative to this file. Default: its folder.",
    )
    python: tuple[str, ...] | None = optional(
        kinds.INTERPRETER,
        "Interpreter on the hosts for a leading `python`: a path, a name, or a "
        "command that starts it.",
    )
    setup: str | list[str] | None = optional(
        kinds.SETUP,
        "Lines for bash, or a file with them: run once on each host, in its login "
        "environment, before anything is imported.",
    )
    requirements: RequirementsSection | None = optional(
        Nested(RequirementsSection),
        "Packages of an environment that is made on hosts that lack it: a "
        "requirements.txt or a pyproject.toml, relative to this file.",
    )
    env: dict[str, str] = key(kinds.ENV, {}, "Variables for every task.")
    secrets: dict[str, SecretSource] = key(
        MapOf(kinds.ENV_NAME, Nested(SecretSource)),
        {},
        "Variables that are never shown and never in an argument.",
    )
    tasks: TasksSection = required(
        Nested(TasksSection), "The tasks of the cluster.", default={}
    )
    runtime: RuntimeSection = key(
        Nested(RuntimeSection), {}, "How the tasks work together."
    )
    hosts: list[HostItem] = key(
        ListShape(Nested(HostItem)), [], "ssh: the hosts, in rank order."
    )
    ssh: SshSection = key(Nested(SshSection), {}, "Backend ssh.")
    spread: bool = key(
        kinds.FLAG,
        False,
        "Each host gets one task before any host gets a second one. Otherwise tasks "
        "fill the slots of one host after the other.",
    )
    launcher: str = key(kinds.WORD, "auto", "What starts the agents on the hosts.")
    ports: PortsSection = key(
        Nested(PortsSection),
        {},
        "The ports of the tasks. Default: free ones, to which only hosts of the run "
        "can connect.",
    )
    restart: RestartSection = key(
        Nested(RestartSection), {}, "What happens after a failure."
    )
    on_end: list[str] | None = optional(
        kinds.COMMAND,
        "A command that runs where tfcluster runs when the run is over; it gets the "
        "outcome as JSON on standard input.",
    )
    start_timeout: float = key(
        kinds.DURATION, "300s", "How long each phase of the start may take."
    )
    progress_timeout: float | None = key(
        kinds.DURATION_OR_OFF,
        False,
        "If a training task makes no step for this long, the run ends with exit code "
        "6.",
        shown="off",
    )
    grace: float = key(
        kinds.DURATION_OR_ZERO,
        "10s",
        "Time between asking a task to stop and killing it.",
    )

"""The shape of cluster.yaml: its keys, their types and their meaning.

``tfcluster schema`` prints the descriptions. ``rules`` checks combinations of keys, and
``describe`` turns them into a Description.
"""

from __future__ import annotations

from tfcluster.config import field_types
from tfcluster.config.shape import ListOf, MapOf, Nested, Section, key, required
from tfcluster.model import PortRange


class SecretSource(Section):
    """Where the value of a secret comes from: a file or a variable."""

    file: str | None = key(
        field_types.LINE, None, "A file that only its owner may read."
    )
    env: str | None = key(
        field_types.ENV_NAME, None, "A variable where tfcluster is started."
    )


class Task(Section):
    """All tasks of one type. A plain number is their count."""

    count: int = key(field_types.COUNT, 1, "How many tasks of this type.")
    gpus: int | None = key(
        field_types.GPUS,
        None,
        "GPUs for each task. Default: a share of its host's GPUs.",
    )
    env: dict[str, str] = key(
        field_types.ENV,
        {},
        "Variables for these tasks; they override those of all tasks.",
    )
    command: list[str] | None = key(
        field_types.COMMAND, None, "What these tasks run instead of `command`."
    )
    server: bool = key(
        field_types.FLAG,
        False,
        "A built-in TensorFlow server runs instead of the command (chief and worker "
        "only).",
    )
    min: int | None = key(
        field_types.COUNT,
        None,
        "worker: minimum number for a restart after a host is lost. Default: all of "
        "them.",
    )


_GROUP = field_types.shorthand(Nested(Task), "count", field_types.COUNT.schema)


class Results(Section):
    """Files that come back from hosts that do not share the workdir. A plain list is
    `patterns`."""

    patterns: list[str] = required(
        ListOf(field_types.LINE),
        "Names or paths, with * and ? (`*.keras`); one that ends in a slash is a "
        "folder (`logs/`).",
    )
    all: bool = key(
        field_types.FLAG,
        False,
        "From every host, into `results-by-host/HOST`. Otherwise from the chief's "
        "host, to where they were written.",
    )


class Workdir(Section):
    """Where tasks run. A plain path is `path`."""

    path: str | None = key(
        field_types.LINE, None, "Relative to this file. Default: its folder."
    )
    sync: str | None = key(
        field_types.LINE,
        None,
        "A folder on the hosts, relative to the home there: hosts that do not share "
        "`path` get a copy of its files in it.",
    )
    exclude: list[str] = key(
        ListOf(field_types.LINE),
        [],
        "Files that are not copied: names or paths, with * and ? (`*.ckpt`).",
    )
    results: Results | None = key(
        field_types.shorthand(
            Nested(Results),
            "patterns",
            {"type": "array", "items": {"type": "string"}},
            of=list,
        ),
        None,
        "Files of the tasks that come back from hosts that do not share `path`.",
    )


class Tasks(Section):
    """The tasks of the cluster."""

    chief: Task | None = key(_GROUP, None, "Rank 0; left out, worker 0 is the chief.")
    worker: Task | None = key(_GROUP, None, "Tasks that train together.")
    ps: Task | None = key(_GROUP, None, "Parameter servers, built in.")
    evaluator: Task | None = key(
        _GROUP, None, "Runs the command outside the training cluster."
    )
    data: Task | None = key(_GROUP, None, "tf.data service, built in.")


class Trace(Section):
    """What `tfcluster trace` shows of the tasks. A plain true or false is `enabled`."""

    enabled: bool = key(
        field_types.FLAG, True, "The tasks record their steps and exchanges."
    )
    steps: int | None = key(
        field_types.whole(1, 10**9),
        None,
        "Record only the first steps, this many. Default: all; the newest are kept.",
    )


class Runtime(Section):
    """How the tasks work together."""

    strategy: str | None = key(
        field_types.words(
            "collective", "parameter_server", "replicated", "local_sgd", "none"
        ),
        None,
        "Default: parameter_server with ps tasks, else collective. none sets "
        "TF_CONFIG and leaves the script alone.",
    )
    transport: str = key(
        field_types.words("auto", "host", "tensorflow", "mpi"),
        "auto",
        "Transport of the exchanges between ranks.",
    )
    bucket_mb: float = key(
        field_types.number(above=0, most=4096),
        25.0,
        "Gradients are exchanged in buckets of this size (MB).",
    )
    compression: str = key(
        field_types.words("none", "fp16", "bf16"),
        "none",
        "Data type in which gradients are sent between hosts.",
    )
    error_feedback: bool = key(
        field_types.FLAG,
        False,
        "Add what compression removes from a gradient to the next one.",
    )
    batch: str = key(
        field_types.words("global", "per_worker"),
        "global",
        "Whether the script's batch size is that of all tasks together or of each.",
    )
    shards: int | None = key(
        field_types.whole(2, 256),
        None,
        "Divide every batch into this many parts, computed and added up in the same "
        "way on any number of ranks, so that all get the same bits.",
    )
    data: str = key(
        field_types.words("shared", "seed_offset"),
        "shared",
        "Whether the tasks divide one shuffled order of the data, or each shuffles "
        "all of it with its own seeds.",
    )
    sync_every: int | None = key(
        field_types.whole(1, 10**9),
        None,
        "local_sgd: steps between averagings; default 100.",
    )
    sync_seconds: float | None = key(
        field_types.number(above=0, most=86400),
        None,
        "local_sgd: seconds between averagings, instead of steps.",
    )
    synchronous: bool = key(
        field_types.FLAG, False, "parameter_server: wait for every worker's gradient."
    )
    chief_only: list[str] = key(
        ListOf(field_types.words("print", "summary")),
        ["summary"],
        "What only the chief does: print() to the console, event files of tf.summary.",
    )
    files: str = key(
        field_types.words("auto", "private", "shared"),
        "auto",
        "Whether files that tasks other than the chief write are seen by these tasks "
        "only.",
    )
    warm_start: bool = key(
        field_types.FLAG,
        True,
        "Import TensorFlow once on each host and fork tasks from it.",
    )
    stall_warning: float | None = key(
        field_types.DURATION_OR_OFF,
        "60s",
        "If others wait this long for a rank, it is named, with its stack.",
    )
    stall_timeout: float | None = key(
        field_types.DURATION_OR_OFF,
        "30m",
        "Ranks that have waited this long for another rank fail with an error.",
    )
    require_exchange: bool = key(
        field_types.FLAG,
        True,
        "A training task that exchanges nothing with the others counts as failed; "
        "false: for scripts that train nothing.",
    )
    trace: Trace = key(
        field_types.shorthand(Nested(Trace), "enabled", {"type": "boolean"}),
        False,
        "Record every step and exchange, for `tfcluster trace`.",
    )


class HostItem(Section):
    """One host, or several alike in hostlist syntax. Plain text is the name."""

    host: str = required(field_types.LINE, "A name, or several: node[01-04,7].")
    slots: int | None = key(field_types.COUNT, None, "Number of tasks that run on it.")
    gpus: int | None = key(
        field_types.GPUS, None, "Number of its GPUs. Default: the host reports it."
    )
    address: str | None = key(
        field_types.LINE, None, "Address at which other hosts reach it."
    )
    user: str | None = key(field_types.USER, None, "User name for ssh.")
    port: int | None = key(field_types.PORT, None, "Port of its sshd.")
    python: tuple[str, ...] | None = key(
        field_types.INTERPRETER, None, "Its Python interpreter, or a command."
    )


_HOST = field_types.shorthand(
    Nested(HostItem), "host", {"type": "string", "minLength": 1}
)


class Ssh(Section):
    """How hosts are reached over SSH. ~/.ssh/config is also read."""

    user: str | None = key(field_types.USER, None, "User name on the hosts.")
    port: int | None = key(field_types.PORT, None, "Port of the sshd.")
    identity_file: str | None = key(field_types.LINE, None, "Private key.")
    config_file: str | None = key(
        field_types.LINE, None, "Client configuration to use."
    )
    known_hosts: str | None = key(field_types.LINE, None, "Host keys to trust.")
    connect_timeout: float = key(
        field_types.DURATION, "10s", "How long one connection may take."
    )


class Restart(Section):
    """What happens after a failure."""

    max: int = key(
        field_types.whole(0, field_types.MAX_COUNT), 0, "Maximum number of restarts."
    )
    scope: str = key(
        field_types.words("auto", "job", "task"),
        "auto",
        "Whether all tasks restart or only the failed one.",
    )
    within: float | None = key(
        field_types.DURATION_OR_OFF,
        False,
        "`max` counts the restarts within this time; off: of the whole run.",
        shown="off",
    )
    backoff: float = key(
        field_types.DURATION_OR_ZERO,
        "0s",
        "How long the first restart waits; each further one waits twice as long.",
    )
    on_time_limit: str = key(
        field_types.words("stop", "requeue"),
        "stop",
        "slurm: what happens when the time limit of the job is near. requeue: the "
        "tasks are stopped, and the job is queued again; that counts as a restart.",
    )


class Ports(Section):
    """The ports of the tasks. Plain text is `range`."""

    range: PortRange | None = key(
        field_types.PORTS, "auto", "auto, or the ports to use: 40000-41000."
    )
    expose: str = key(
        field_types.words("run", "any"),
        "run",
        "Who can connect to TensorFlow's servers: the hosts of the run, or any "
        "machine.",
    )


class Requirements(Section):
    """An environment that is made on hosts that lack it. Plain text is the file."""

    file: str = required(field_types.LINE, "A requirements.txt or a pyproject.toml.")
    system_site_packages: bool = key(
        field_types.FLAG,
        False,
        "The packages of the interpreter below are visible, too.",
    )


_REQUIREMENTS = field_types.shorthand(
    Nested(Requirements), "file", {"type": "string", "minLength": 1}
)


class Cluster(Section):
    """A TensorFlow cluster and what runs on it, as `tfcluster launch` reads it."""

    name: str | None = key(
        field_types.NAME,
        None,
        "Only one active run can have it. Default: the file's stem, which several "
        "runs can share.",
    )
    backend: str = key(field_types.WORD, "local", "Where the hosts come from.")
    command: list[str] | None = key(
        field_types.COMMAND,
        None,
        "The command of every task: a list, or a string that is split as a POSIX "
        "shell would, but no shell runs it.",
    )
    workdir: Workdir = key(
        field_types.shorthand(Nested(Workdir), "path", {"type": "string"}),
        {},
        "Where tasks run, relative to this file. Default: its folder.",
    )
    python: tuple[str, ...] | None = key(
        field_types.INTERPRETER,
        None,
        "Interpreter on the hosts for a leading `python`: a path, a name, or a "
        "command that starts it.",
    )
    setup: str | list[str] | None = key(
        field_types.SETUP,
        None,
        "Lines for bash, or a file with them: run once on each host, in its login "
        "environment, before anything is imported.",
    )
    requirements: Requirements | None = key(
        _REQUIREMENTS,
        None,
        "Packages of an environment that is made on hosts that lack it: a "
        "requirements.txt or a pyproject.toml, relative to this file.",
    )
    env: dict[str, str] = key(field_types.ENV, {}, "Variables for every task.")
    secrets: dict[str, SecretSource] = key(
        MapOf(field_types.ENV_NAME, Nested(SecretSource)),
        {},
        "Variables that are never shown and never in an argument.",
    )
    tasks: Tasks = required(Nested(Tasks), "The tasks of the cluster.")
    runtime: Runtime = key(Nested(Runtime), {}, "How the tasks work together.")
    hosts: list[HostItem] = key(ListOf(_HOST), [], "ssh: the hosts, in rank order.")
    ssh: Ssh = key(Nested(Ssh), {}, "Backend ssh.")
    spread: bool = key(
        field_types.FLAG,
        False,
        "Each host gets one task before any host gets a second one. Otherwise tasks "
        "fill the slots of one host after the other.",
    )
    launcher: str = key(
        field_types.WORD, "auto", "What starts the agents on the hosts."
    )
    ports: Ports = key(
        field_types.shorthand(Nested(Ports), "range", {"type": "string"}),
        {},
        "The ports of the tasks. Default: free ones, to which only hosts of the run "
        "can connect.",
    )
    restart: Restart = key(Nested(Restart), {}, "What happens after a failure.")
    on_end: list[str] | None = key(
        field_types.COMMAND,
        None,
        "A command that runs where tfcluster runs when the run is over; it gets the "
        "outcome as JSON on standard input.",
    )
    start_timeout: float = key(
        field_types.DURATION, "300s", "How long each phase of the start may take."
    )
    progress_timeout: float | None = key(
        field_types.DURATION_OR_OFF,
        False,
        "If a training task makes no step for this long, the run ends with exit code "
        "6.",
        shown="off",
    )
    grace: float = key(
        field_types.DURATION_OR_ZERO,
        "10s",
        "Time between asking a task to stop and killing it.",
    )

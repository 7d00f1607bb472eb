"""The shape of cluster.yaml: its keys, their types and their meaning.

``tfcluster schema`` prints the descriptions. ``rules`` checks combinations of keys, and
``describe`` turns them into a Description.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tfcluster.config import field_types


class Section(BaseModel):
    """Unknown keys are errors, and values are never silently converted."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, validate_default=True
    )


class SecretSource(Section):
    """Where the value of a secret comes from: a file or a variable."""

    file: Annotated[
        field_types.Line | None,
        Field(default=None, description="A file that only its owner may read."),
    ]
    env: Annotated[
        field_types.EnvName | None,
        Field(default=None, description="A variable where tfcluster is started."),
    ]


class Task(Section):
    """All tasks of one type. A plain number is their count."""

    count: Annotated[
        field_types.Count, Field(default=1, description="How many tasks of this type.")
    ]
    gpus: Annotated[
        field_types.Gpus | None,
        Field(
            default=None,
            description="GPUs for each task. Default: a share of its host's GPUs.",
        ),
    ]
    env: Annotated[
        field_types.Env,
        Field(
            default={},
            description="Variables for these tasks; they override those of all tasks.",
        ),
    ]
    command: Annotated[
        field_types.Command | None,
        Field(default=None, description="What these tasks run instead of `command`."),
    ]
    server: Annotated[
        bool,
        Field(
            default=False,
            description="A built-in TensorFlow server runs instead of the command "
            "(chief and worker only).",
        ),
    ]
    min: Annotated[
        field_types.Count | None,
        Field(
            default=None,
            description="worker: minimum number for a restart after a "
            "host is lost. Default: all of them.",
        ),
    ]


Group = Annotated[
    Task,
    field_types.Shorthand(
        "count", {"type": "integer", "minimum": 1, "maximum": field_types.MAX_COUNT}
    ),
]


class Results(Section):
    """Files that come back from hosts that do not share the workdir. A plain list is
    `patterns`."""

    patterns: Annotated[
        list[field_types.Line],
        Field(
            description="Names or paths, with * and ? (`*.keras`); one that ends in "
            "a slash is a folder (`logs/`)."
        ),
    ]
    all: Annotated[
        bool,
        Field(
            default=False,
            description="From every host, into `results-by-host/HOST`. Otherwise from "
            "the chief's host, to where they were written.",
        ),
    ]


class Workdir(Section):
    """Where tasks run. A plain path is `path`."""

    path: Annotated[
        field_types.Line | None,
        Field(default=None, description="Relative to this file. Default: its folder."),
    ]
    sync: Annotated[
        field_types.Line | None,
        Field(
            default=None,
            description="A folder on the hosts, relative to the home there: hosts that "
            "do not share `path` get a copy of its files in it.",
        ),
    ]
    exclude: Annotated[
        list[field_types.Line],
        Field(
            default=[],
            description="Files that are not copied: names or paths, with * and ? "
            "(`*.ckpt`).",
        ),
    ]
    results: Annotated[
        Results | None,
        field_types.Shorthand(
            "patterns", {"type": "array", "items": {"type": "string"}}, of=list
        ),
        Field(
            default=None,
            description="Files of the tasks that come back from hosts that do not "
            "share `path`.",
        ),
    ]


class Tasks(Section):
    """The tasks of the cluster."""

    chief: Annotated[
        Group | None,
        Field(default=None, description="Rank 0; left out, worker 0 is the chief."),
    ]
    worker: Annotated[
        Group | None, Field(default=None, description="Tasks that train together.")
    ]
    ps: Annotated[
        Group | None,
        Field(default=None, description="Parameter servers, built in."),
    ]
    evaluator: Annotated[
        Group | None,
        Field(
            default=None,
            description="Runs the command outside the training cluster.",
        ),
    ]
    data: Annotated[
        Group | None, Field(default=None, description="tf.data service, built in.")
    ]


class Trace(Section):
    """What `tfcluster trace` shows of the tasks. A plain true or false is `enabled`."""

    enabled: Annotated[
        bool,
        Field(default=True, description="The tasks record their steps and exchanges."),
    ]
    steps: Annotated[
        int | None,
        Field(
            default=None,
            ge=1,
            le=10**9,
            description="Record only the first steps, this many. Default: all; the "
            "newest are kept.",
        ),
    ]


class Runtime(Section):
    """How the tasks work together."""

    strategy: Annotated[
        Literal["collective", "parameter_server", "replicated", "local_sgd", "none"]
        | None,
        Field(
            default=None,
            description="Default: parameter_server with ps tasks, "
            "else collective. none sets TF_CONFIG and leaves the script alone.",
        ),
    ]
    transport: Annotated[
        Literal["auto", "host", "tensorflow", "mpi"],
        Field(default="auto", description="Transport of the exchanges between ranks."),
    ]
    bucket_mb: Annotated[
        float,
        Field(
            default=25.0,
            gt=0,
            le=4096,
            description="Gradients are exchanged in buckets of this size (MB).",
        ),
    ]
    compression: Annotated[
        Literal["none", "fp16", "bf16"],
        Field(
            default="none",
            description="Data type in which gradients are sent between hosts.",
        ),
    ]
    error_feedback: Annotated[
        bool,
        Field(
            default=False,
            description="Add what compression removes from a gradient to the next one.",
        ),
    ]
    batch: Annotated[
        Literal["global", "per_worker"],
        Field(
            default="global",
            description="Whether the script's batch size is that of all tasks "
            "together or of each.",
        ),
    ]
    shards: Annotated[
        int | None,
        Field(
            default=None,
            ge=2,
            le=256,
            description="Divide every batch into this many parts, computed and added "
            "up in the same way on any number of ranks, so that all get the same bits.",
        ),
    ]
    data: Annotated[
        Literal["shared", "seed_offset"],
        Field(
            default="shared",
            description="Whether the tasks divide one shuffled order of the "
            "data, or each shuffles all of it with its own seeds.",
        ),
    ]
    sync_every: Annotated[
        int | None,
        Field(
            default=None,
            ge=1,
            le=10**9,
            description="local_sgd: steps between averagings; default 100.",
        ),
    ]
    sync_seconds: Annotated[
        float | None,
        Field(
            default=None,
            gt=0,
            le=86400,
            description="local_sgd: seconds between averagings, instead of steps.",
        ),
    ]
    synchronous: Annotated[
        bool,
        Field(
            default=False,
            description="parameter_server: wait for every worker's gradient.",
        ),
    ]
    chief_only: Annotated[
        list[Literal["print", "summary"]],
        Field(
            default=["summary"],
            description="What only the chief does: print() to the console, event "
            "files of tf.summary.",
        ),
    ]
    files: Annotated[
        Literal["auto", "private", "shared"],
        Field(
            default="auto",
            description="Whether files that tasks other than the chief write are seen "
            "by these tasks only.",
        ),
    ]
    warm_start: Annotated[
        bool,
        Field(
            default=True,
            description="Import TensorFlow once on each host and fork tasks from it.",
        ),
    ]
    stall_warning: Annotated[
        field_types.DurationOrOff,
        Field(
            default="60s",
            description="If others wait this long for a rank, it is named, with "
            "its stack.",
        ),
    ]
    stall_timeout: Annotated[
        field_types.DurationOrOff,
        Field(
            default="30m",
            description="Ranks that have waited this long for another rank fail "
            "with an error.",
        ),
    ]
    require_exchange: Annotated[
        bool,
        Field(
            default=True,
            description="A training task that exchanges nothing with the others "
            "counts as failed; false: for scripts that train nothing.",
        ),
    ]
    trace: Annotated[
        Trace,
        field_types.Shorthand("enabled", {"type": "boolean"}),
        Field(
            default=False,
            description="Record every step and exchange, for `tfcluster trace`.",
        ),
    ]


class HostItem(Section):
    """One host, or several alike in hostlist syntax. Plain text is the name."""

    host: Annotated[
        field_types.Line, Field(description="A name, or several: node[01-04,7].")
    ]
    slots: Annotated[
        field_types.Count | None,
        Field(default=None, description="Number of tasks that run on it."),
    ]
    gpus: Annotated[
        field_types.Gpus | None,
        Field(
            default=None,
            description="Number of its GPUs. Default: the host reports it.",
        ),
    ]
    address: Annotated[
        field_types.Line | None,
        Field(default=None, description="Address at which other hosts reach it."),
    ]
    user: Annotated[
        field_types.User | None, Field(default=None, description="User name for ssh.")
    ]
    port: Annotated[
        field_types.Port | None, Field(default=None, description="Port of its sshd.")
    ]
    python: Annotated[
        field_types.Interpreter | None,
        Field(default=None, description="Its Python interpreter, or a command."),
    ]


Host = Annotated[
    HostItem, field_types.Shorthand("host", {"type": "string", "minLength": 1})
]


class Ssh(Section):
    """How hosts are reached over SSH. ~/.ssh/config is also read."""

    user: Annotated[
        field_types.User | None,
        Field(default=None, description="User name on the hosts."),
    ]
    port: Annotated[
        field_types.Port | None, Field(default=None, description="Port of the sshd.")
    ]
    identity_file: Annotated[
        field_types.Line | None, Field(default=None, description="Private key.")
    ]
    config_file: Annotated[
        field_types.Line | None,
        Field(default=None, description="Client configuration to use."),
    ]
    known_hosts: Annotated[
        field_types.Line | None, Field(default=None, description="Host keys to trust.")
    ]
    connect_timeout: Annotated[
        field_types.Duration,
        Field(default="10s", description="How long one connection may take."),
    ]


class Restart(Section):
    """What happens after a failure."""

    max: Annotated[
        int,
        Field(
            default=0,
            ge=0,
            le=field_types.MAX_COUNT,
            description="Maximum number of restarts.",
        ),
    ]
    scope: Annotated[
        Literal["auto", "job", "task"],
        Field(
            default="auto",
            description="Whether all tasks restart or only the failed one.",
        ),
    ]
    within: Annotated[
        field_types.DurationOrOff,
        Field(
            default=False,
            json_schema_extra={"default": "off"},
            description="`max` counts the restarts within this time; off: of the whole "
            "run.",
        ),
    ]
    backoff: Annotated[
        field_types.DurationOrZero,
        Field(
            default="0s",
            description="How long the first restart waits; each further one waits "
            "twice as long.",
        ),
    ]
    on_time_limit: Annotated[
        Literal["stop", "requeue"],
        Field(
            default="stop",
            description="slurm: what happens when the time limit of the job is near. "
            "requeue: the tasks are stopped, and the job is queued again; that counts "
            "as a restart.",
        ),
    ]


class Ports(Section):
    """The ports of the tasks. Plain text is `range`."""

    range: Annotated[
        field_types.Ports,
        Field(default="auto", description="auto, or the ports to use: 40000-41000."),
    ]
    expose: Annotated[
        Literal["run", "any"],
        Field(
            default="run",
            description="Who can connect to TensorFlow's servers: the hosts of the "
            "run, or any machine.",
        ),
    ]


class Requirements(Section):
    """An environment that is made on hosts that lack it. Plain text is the file."""

    file: Annotated[
        field_types.Line,
        Field(description="A requirements.txt or a pyproject.toml."),
    ]
    system_site_packages: Annotated[
        bool,
        Field(
            default=False,
            description="The packages of the interpreter below are visible, too.",
        ),
    ]


Environment = Annotated[
    Requirements, field_types.Shorthand("file", {"type": "string", "minLength": 1})
]


class Cluster(Section):
    """A TensorFlow cluster and what runs on it, as `tfcluster launch` reads it."""

    # ``sections`` adds what depends on the schedulers: their names and sections.

    name: Annotated[
        field_types.Name | None,
        Field(
            default=None,
            description="Only one active run can have it. Default: the file's "
            "stem, which several runs can share.",
        ),
    ]
    backend: Annotated[
        str,
        Field(default="local", description="Where the hosts come from."),
    ]
    command: Annotated[
        field_types.Command | None,
        Field(
            default=None,
            description="The command of every task: a list, or a string that is "
            "split as a POSIX shell would, but no shell runs it.",
        ),
    ]
    workdir: Annotated[
        Workdir,
        field_types.Shorthand("path", {"type": "string"}),
        Field(
            default={},
            description="Where tasks run, relative to this file. Default: its folder.",
        ),
    ]
    python: Annotated[
        field_types.Interpreter | None,
        Field(
            default=None,
            description="Interpreter on the hosts for a leading `python`: a path, a "
            "name, or a command that starts it.",
        ),
    ]
    setup: Annotated[
        field_types.Setup | None,
        Field(
            default=None,
            description="Lines for bash, or a file with them: run once on each host, "
            "in its login environment, before anything is imported.",
        ),
    ]
    requirements: Annotated[
        Environment | None,
        Field(
            default=None,
            description="Packages of an environment that is made on hosts that lack "
            "it: a requirements.txt or a pyproject.toml, relative to this file.",
        ),
    ]
    env: Annotated[
        field_types.Env, Field(default={}, description="Variables for every task.")
    ]
    secrets: Annotated[
        dict[field_types.EnvName, SecretSource],
        Field(
            default={},
            description="Variables that are never shown and never in an argument.",
        ),
    ]
    tasks: Annotated[Tasks, Field(description="The tasks of the cluster.")]
    runtime: Annotated[
        Runtime, Field(default={}, description="How the tasks work together.")
    ]
    hosts: Annotated[
        list[Host], Field(default=[], description="ssh: the hosts, in rank order.")
    ]
    ssh: Annotated[Ssh, Field(default={}, description="Backend ssh.")]
    spread: Annotated[
        bool,
        Field(
            default=False,
            description="Each host gets one task before any host gets a second one. "
            "Otherwise tasks fill the slots of one host after the other.",
        ),
    ]
    launcher: Annotated[
        str,
        Field(default="auto", description="What starts the agents on the hosts."),
    ]
    ports: Annotated[
        Ports,
        field_types.Shorthand("range", {"type": "string"}),
        Field(
            default={},
            description="The ports of the tasks. Default: free ones, to which only "
            "hosts of the run can connect.",
        ),
    ]
    restart: Annotated[
        Restart, Field(default={}, description="What happens after a failure.")
    ]
    on_end: Annotated[
        field_types.Command | None,
        Field(
            default=None,
            description="A command that runs where tfcluster runs when the run is "
            "over; it gets the outcome as JSON on standard input.",
        ),
    ]
    start_timeout: Annotated[
        field_types.Duration,
        Field(default="300s", description="How long each phase of the start may take."),
    ]
    progress_timeout: Annotated[
        field_types.DurationOrOff,
        Field(
            default=False,
            json_schema_extra={"default": "off"},
            description="If a training task makes no step for this long, the "
            "run ends with exit code 6.",
        ),
    ]
    grace: Annotated[
        field_types.DurationOrZero,
        Field(
            default="10s",
            description="Time between asking a task to stop and killing it.",
        ),
    ]

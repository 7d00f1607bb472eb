"""The srun commands of agents and of the question for GPUs; srun's messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfcluster.schedulers.agent_bundle import OWN_WORDS

BUSY_S = 60
"""How many seconds a step may wait for Slurm to start it."""

# Variables of srun(1), INPUT ENVIRONMENT VARIABLES, that would apply the job's options
# to our steps.
_SHAPING = re.compile(
    r"S(?:LURM|RUN)_(?:"
    r"CPUS_PER_TASK|CPUS_PER_GPU|CORE_SPEC|CPU_BIND|CPU_FREQ_REQ|DISTRIBUTION|EXACT"
    r"|EXCLUSIVE|EXPORT_ENV|GPU_BIND|GPU_FREQ|GPUS_PER_SOCKET|GPUS_PER_TASK|GPUS|GRES"
    r"|HINT|KILL_BAD_EXIT|LABELIO|MEM_BIND|MEM_PER_(?:CPU|GPU|NODE)|MPI_TYPE"
    r"|MULTI_PROG|NNODES|NTASKS|NPROCS|NTASKS_PER_(?:CORE|GPU|NODE|SOCKET|TRES)"
    r"|OVERCOMMIT|OVERLAP|STDERRMODE|STDINMODE|STDOUTMODE|STEP_GRES|THREADS"
    r"|THREADS_PER_CORE|TRES_BIND|TRES_PER_TASK|UNBUFFEREDIO|WAIT"
    r")"
)

_ALWAYS = (
    "--overlap",
    "--mem=0",
    "--cpu-bind=none",
    "--mpi=none",
    "--export=ALL",
    "--kill-on-bad-exit=0",
    f"--immediate={BUSY_S}",
    "--chdir=/",
    "--job-name=tfcluster",
    "--quiet",
)
# A constant: no user input goes into this shell command. Device names are used as they
# are on each host: SLURM_JOB_GPUS has the names on the batch host, and inside a cgroup
# names start at 0 again, or may be UUIDs or parts of a GPU.
_ASK = 'echo "tfcluster-gpus $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES-unset}"'
_MARK = "tfcluster-gpus"
_GPU_COUNTS = (
    "SLURM_GPUS",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
)
_GPU_NAMES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_INPUT = "--input=all"
_EXITED = re.compile(r"srun: error: .*: Exited with exit code \d+")


def srun_argv(
    host: str,
    argv: Sequence[str],
    *,
    group: int | None = None,
    gpus: int | None = None,
) -> tuple[str, ...]:
    """An srun command that runs ``argv`` once on ``host``.

    ``group`` is the component of a heterogeneous job, ``gpus`` is as in ``Node``.

    The step reserves nothing and waits for no other step: all agents of all runs in a
    job share its hosts (``--overlap``, ``--mem=0``). The host determines what the tasks
    may use, not a binding of their agent. Output is not ``--unbuffered``, which would
    put a terminal in between.
    """
    return ("srun", *_where([host], group, gpus), *_ALWAYS, _INPUT, *argv)


def group_argv(
    hosts: Sequence[str],
    argv: Sequence[str],
    *,
    group: int | None = None,
    gpus: int | None = None,
) -> tuple[str, ...]:
    """An srun command that runs ``argv`` once on each of ``hosts``, in one step.

    A host that fails or ends must not end the others (``--no-kill``, ``--wait=0``).
    Each line of standard error begins with the number of its task (``--label``).
    """
    more = ("--ntasks-per-node=1", "--no-kill", "--wait=0", "--label")
    return ("srun", *_where(hosts, group, gpus), *more, *_ALWAYS, _INPUT, *argv)


def _where(
    hosts: Sequence[str], group: int | None, gpus: int | None
) -> tuple[str, ...]:
    component = () if group is None else (f"--het-group={group}",)
    devices = () if gpus is None else (f"--gpus-per-node={gpus}",)
    names, count = ",".join(hosts), len(hosts)
    size = (f"--nodes={count}", f"--ntasks={count}", f"--nodelist={names}")
    return (*component, *size, *devices)


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The job's environment without variables that would change our steps."""
    return {
        name: value for name, value in environ.items() if not _SHAPING.fullmatch(name)
    }


_OF_THE_AGENT = re.compile(rf"^(?:\s*\d+: )?{OWN_WORDS}.*$", re.MULTILINE)
_OVER = (
    "the job is over",
    "its variables are still set in this shell: `unset ${!SLURM_@}`",
)
_MEANINGS = (
    (r"Invalid job id|already (?:completing|completed|finished)|job .* expired", _OVER),
    (r"Unable to confirm allocation", _OVER),
    (
        r"temporarily disabled|nodes are busy|Immediate execution impossible",
        (
            "Slurm does not start the job step",
            "other steps of the job hold the node: run them with --overlap",
        ),
    ),
    (
        r"is not responding|Node .*(?:fail|not in this state)|Communication connection"
        r"|Zero Bytes|Socket timed out|NODE_FAIL|DUE TO NODE FAILURE",
        (
            "Slurm cannot reach the node",
            "`sinfo -R` shows why; a new job gets another node",
        ),
    ),
    (
        r"not in (?:this job|job's) |Requested node configuration|Invalid node name"
        r"|nodes? .*not .*(?:allocat|available)",
        ("the node is not part of the job", None),
    ),
    (
        r"[Ii]nvalid account|association",
        ("Slurm refuses the account", "slurm: {account: ...}"),
    ),
    (
        r"Unable to contact slurm controller|Connection refused|Protocol authentication"
        r"|establish a configuration source|[Mm]unge",
        (
            "Slurm's controller does not answer",
            "`scontrol ping` checks it; a running job continues without it",
        ),
    ),
    (
        r"execve\(\).*: (?:No such file|Permission denied)|No such file or directory",
        (
            "the interpreter does not exist",
            "set 'python' to the path of one that all nodes have",
        ),
    ),
    (
        r"CANCELLED .*DUE TO TIME LIMIT",
        ("the job's time limit was reached", "slurm: {time: ...}"),
    ),
    (r"CANCELLED .*DUE TO PREEMPTION", ("the job was preempted", None)),
    (r"CANCELLED", ("the job, or this step of it, was cancelled", None)),
)


def meaning(said: str) -> tuple[str, str | None] | None:
    """An explanation of srun's messages, and a hint or None; None if unknown."""
    said = _OF_THE_AGENT.sub("", said)
    for pattern, found in _MEANINGS:
        if re.search(pattern, said):
            return found
    return None


def own_words(said: str) -> str:
    """The most informative line of srun: its first error, without the prefix."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    line = (errors or lines or [""])[0]
    return re.sub(r"^(?:srun|slurmstepd[^:]*): (?:error: )?", "", line).strip()


def has_reason(words: str) -> bool:
    """Whether these lines say more than that a process has exited."""
    return any(not _EXITED.fullmatch(line) for line in words.splitlines())


def words_about(said: str, host: str, task: int) -> str:
    """A labelled step's lines from its ``task``, or from srun about ``host``.

    The labels are removed.
    """
    label = re.compile(rf"\s*{task}: (.*)")
    named = re.compile(rf"(?:srun|slurmstepd).*(?<![\w.-]){re.escape(host)}(?![\w-])")
    found = []
    for line in said.splitlines():
        if match := label.fullmatch(line):
            found.append(match[1])
        elif named.match(line):
            found.append(line)
    return "\n".join(found)


def has_gpus(environ: Mapping[str, str]) -> bool:
    """Whether any variable says that the job has GPUs."""
    counted = any(environ.get(name, "0") not in ("", "0") for name in _GPU_COUNTS)
    return counted or any(environ.get(name) for name in _GPU_NAMES)


def gpu_question_argv(
    hosts: Sequence[str], *, group: int | None = None, gpus: int | None = None
) -> tuple[str, ...]:
    """An srun command that asks ``hosts`` for the job's GPUs there, in one step."""
    shell = ("/bin/sh", "-c", _ASK)
    options = ("--ntasks-per-node=1", *_ALWAYS, "--input=none")
    return ("srun", *_where(hosts, group, gpus), *options, *shell)


def parse_gpus(said: str) -> dict[str, tuple[str, ...] | None]:
    """Node -> device names, for nodes that answered.

    None: Slurm does not bind GPUs there; (): the node has no GPU for us.
    """
    found: dict[str, tuple[str, ...] | None] = {}
    for line in said.splitlines():
        mark, _, rest = line.partition(" ")
        node, _, devices = rest.partition(" ")
        if mark == _MARK and rest:
            found[node] = _devices(devices.strip())
    return found


def _devices(text: str) -> tuple[str, ...] | None:
    if text == "unset":
        return None
    if text in ("NoDevFiles", "-1"):
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())

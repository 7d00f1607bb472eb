"""The srun commands of agents and of the question for GPUs; srun's messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfcluster.schedulers.agent_bundle import OWN_WORDS
from tfcluster.schedulers.job_hosts import CUDA, gpus_given

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
_GPU_NAMES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_EXITED = re.compile(r"srun: error: .*: Exited with exit code \d+")


def step_argv(
    hosts: Sequence[str],
    argv: Sequence[str],
    *,
    group: int | None = None,
    gpus: int | None = None,
) -> tuple[str, ...]:
    """An srun command that runs ``argv`` once on each of ``hosts``, in one step.

    ``group`` is the component of a heterogeneous job, ``gpus`` is as in ``SlurmNode``.

    The step reserves nothing and waits for no other step: all agents of all runs in a
    job share its hosts (``--overlap``, ``--mem=0``). The host determines what the tasks
    may use, not a binding of their agent. Output is not ``--unbuffered``, which would
    put a terminal in between.

    One of several hosts that fails or ends must not end the others (``--no-kill``,
    ``--wait=0``), and each line of standard error then begins with the number of its
    task (``--label``).
    """
    more: tuple[str, ...] = ()
    if len(hosts) > 1:
        more = ("--ntasks-per-node=1", "--no-kill", "--wait=0", "--label")
    return ("srun", *_where(hosts, group, gpus), *more, *_ALWAYS, "--input=all", *argv)


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
_MEANINGS = (
    (
        r"Invalid job id|already (?:completing|completed|finished)|job .* expired"
        r"|Unable to confirm allocation",
        "the job is over",
        "its variables are still set in this shell: `unset ${!SLURM_@}`",
    ),
    (
        r"temporarily disabled|nodes are busy|Immediate execution impossible",
        "Slurm does not start the job step",
        "other steps of the job hold the node: run them with --overlap",
    ),
    (
        r"is not responding|Node .*(?:fail|not in this state)|Communication connection"
        r"|Zero Bytes|Socket timed out|NODE_FAIL|DUE TO NODE FAILURE",
        "Slurm cannot reach the node",
        "`sinfo -R` shows why; a new job gets another node",
    ),
    (
        r"Unable to contact slurm controller|Connection refused|Protocol authentication"
        r"|establish a configuration source|[Mm]unge",
        "Slurm's controller does not answer",
        "`scontrol ping` checks it; a running job continues without it",
    ),
    (
        r"execve\(\).*: (?:No such file|Permission denied)|No such file or directory",
        "the interpreter does not exist",
        "set 'python' to the path of one that all nodes have",
    ),
)


def meaning(words: str) -> tuple[str, str] | None:
    """An explanation of srun's messages, and a hint; None if unknown."""
    words = _OF_THE_AGENT.sub("", words)
    for pattern, explanation, hint in _MEANINGS:
        if re.search(pattern, words):
            return explanation, hint
    return None


def explained(words: str) -> str:
    """``meaning`` with srun's own message in between; "" if unknown."""
    text, hint = meaning(words) or ("", "")
    return f"{text}: {own_words(words)}; {hint}" if text else ""


def own_words(words: str) -> str:
    """The most informative line of srun: its first error, without the prefix."""
    lines = [line for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    line = (errors or lines or [""])[0]
    return re.sub(r"^(?:srun|slurmstepd[^:]*): (?:error: )?", "", line).strip()


def reason(words: str) -> str:
    """The last line that says more than that a process has exited; "" if none does."""
    lines = [line for line in words.splitlines() if not _EXITED.fullmatch(line)]
    return lines[-1] if lines else ""


def words_about(words: str, host: str, task: int) -> str:
    """A labelled step's lines from ``task`` or about ``host``, without labels."""
    name = re.escape(host)
    line = rf"\s*{task}: (.*)|((?:srun|slurmstepd).*(?<![\w.-]){name}(?![\w-]).*)"
    matches = (re.fullmatch(line, text) for text in words.splitlines())
    return "\n".join(match[1] or match[2] or "" for match in matches if match)


def has_gpus(environ: Mapping[str, str]) -> bool:
    """Whether any variable says that the job has GPUs."""
    counts = (v for name, v in environ.items() if name.startswith("SLURM_GPUS"))
    counted = any(count not in ("", "0") for count in counts)
    return counted or any(environ.get(name) for name in _GPU_NAMES)


def gpu_question_argv(
    hosts: Sequence[str], *, group: int | None = None, gpus: int | None = None
) -> tuple[str, ...]:
    """An srun command that asks ``hosts`` for the job's GPUs there, in one step."""
    shell = ("/bin/sh", "-c", _ASK)
    options = ("--ntasks-per-node=1", *_ALWAYS, "--input=none")
    return ("srun", *_where(hosts, group, gpus), *options, *shell)


def parse_gpus(answer: str) -> dict[str, tuple[str, ...] | None]:
    """Node -> device names; None: Slurm does not bind GPUs, (): none for us."""
    words = (line.split(" ", 2) for line in answer.splitlines())
    devices = {word[1]: word[2] for word in words if word[0] == _MARK and word[2:]}
    return {
        node: None if text == "unset" else gpus_given({CUDA[0]: text})
        for node, text in devices.items()
    }

"""Grid Engine: the hosts of a job's parallel environment, and ``qrsh -inherit``.

Works inside a job; ``submit`` submits jobs. The host on which the job's script runs
needs no qrsh: its agent is a child process, as with the backend ``local``.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfcluster.base.errors import ConfigError, ExitCode, Problem
from tfcluster.plan.host_patterns import host_name_problem
from tfcluster.plan.model import Allocation, Description, Host, Interpreter
from tfcluster.schedulers import process_channel
from tfcluster.schedulers.agent_bundle import agent_argv, send_agent
from tfcluster.schedulers.base import (
    BatchScheduler,
    LauncherCommand,
    gpus_of_all,
    placeholders,
    setting,
)
from tfcluster.schedulers.job_hosts import (
    CUDA,
    gpu_question,
    gpus_on,
    host_file,
    hosts_with_gpus,
    is_one_of,
    own_names,
)
from tfcluster.schedulers.options import (
    ARRAY,
    BASH,
    ENVIRONMENT,
    FOLLOWS,
    NOTHING,
    OUTPUT,
    RESTART,
    SCRIPT,
    Mistake,
    OptionTable,
    lines,
)
from tfcluster.schedulers.process_channel import ProcessChannel
from tfcluster.schedulers.sge import queue
from tfcluster.schedulers.sge.queue import (
    find_program,
    meaning,
    qrsh_argv,
    shielded,
    start_process,
)
from tfcluster.schedulers.starting import AgentChannel, Starter

_SWEEP_S = 5.0
_COUNT = re.compile("[0-9]{1,9}")
_STALE = (
    "start a new shell, or `unset JOB_ID SGE_TASK_ID PE_HOSTFILE`, if this shell is "
    "not inside a job"
)
GPU_VARIABLES = (*CUDA, "SGE_HGR_gpu", "SGV_HGR_gpu", "SGE_GPU")
"""Variables that name GPUs; the first one that is set counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgeSettings:
    """What is requested from Grid Engine."""

    parallel_environment: str | None = setting("word", "qsub -pe: its name.")
    slots: int | None = setting("count", "qsub -pe: how many.")
    queue: str | None = setting("words", "qsub -q.", option="-q")
    resources: Mapping[str, str] = setting("resources", "qsub -l, name and value.", {})
    options: tuple[str, ...] = setting(
        "options", "More options of qsub, one word per item.", ()
    )


_H_RT = 'resources: {h_rt: "4:00:00"}'
_H_VMEM = "resources: {h_vmem: 16G}"
_EXAMPLE = """\
backend: sge                     # `tfcluster launch` submits a job, or uses its own
sge:
  parallel_environment: mpi      # one of `qconf -spl`
  resources: {h_rt: "1:00:00"}   # quoted: YAML reads 1:00:00 as 3600
  # queue: all.q
  # options: ["-P", "x"]
"""


_RESOURCE = re.compile(r"[A-Za-z0-9_.-]+=[A-Za-z0-9._:+/@%*|!&-]+")
_GPU_RESOURCE = re.compile(r".*(?:gpu|cuda).*", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*|!&-]+")
_PATH = re.compile(r"[A-Za-z0-9_./+@=,%~<>-]+")
"""In a path, ``$`` would begin a qsub variable, and ``:`` would end a host name."""
_OPTIONS = OptionTable(
    command="qsub",
    plain=_PLAIN,
    denied={
        "-@": "options come from this file only",
        "-C": "it would change which lines are directives",
        "-S": BASH,
        "-V": ENVIRONMENT,
        "-v": ENVIRONMENT,
        "-b": SCRIPT,
        "-clear": "it would undo the options before it",
        **dict.fromkeys(("-e", "-j", "-o"), OUTPUT),
        **dict.fromkeys(("-help", "-verify"), NOTHING),
        "-i": "the launcher reads no input",
        "-inherit": "it is for tasks of a job, not for jobs",
        **dict.fromkeys(("-now", "-sync"), FOLLOWS),
        "-pe": "'parallel_environment' and 'slots' set it",
        "-r": RESTART,
        "-shell": SCRIPT,
        **dict.fromkeys(("-t", "-tc"), ARRAY),
        "-terse": "tfcluster reads qsub's answer",
        "-w": "tfcluster needs qsub to refuse jobs that can never run",
    },
)


class SgeScheduler(BatchScheduler):
    """The granted hosts and slots, in Grid Engine's order."""

    name = "sge"
    title = "Grid Engine"
    settings = SgeSettings
    state = staticmethod(queue.state)
    options = _OPTIONS
    launcher = "qrsh"
    example = _EXAMPLE
    synonyms: Mapping[str, str] = {
        **dict.fromkeys(("pe", "parallel_env"), "parallel_environment"),
        **dict.fromkeys(("nslots", "ntasks", "cores", "processes"), "slots"),
        **dict.fromkeys(("l", "resource_spec", "resource"), "resources"),
    }
    advice: Mapping[str, str] = {
        **dict.fromkeys(("time", "walltime", "h_rt", "timeout", "runtime"), _H_RT),
        **dict.fromkeys(("mem", "memory", "h_vmem", "mem_free"), _H_VMEM),
        **dict.fromkeys(("project", "p"), 'options: ["-P", "x"]'),
        "account": 'options: ["-A", "x"]',
    }
    submit_command = "qsub"
    job_id = queue.JOB_ID
    prefix = queue.PREFIX
    hints = queue.HINTS
    why_no_requeue = "Grid Engine does not start a job on several hosts again"
    without_gpus = (
        "the job has none: ask for them with -l, as `-l gpu=1`; `qconf -sc` has the "
        "site's name"
    )

    def more_slots(self, tasks: int, hosts: int) -> str:
        return f"ask for them: `-pe NAME {tasks}` of qsub"

    def expected(self, description: Description) -> Allocation:
        slots = sge_slots(description, self.settings_in(description))
        hosts = placeholders(1, slots, gpus_of_all(description))
        return self.granted(description, hosts)

    def mistakes(self, description: Description, sge: SgeSettings) -> Iterator[Mistake]:
        tasks = len(description.task_ids())
        for name, value in sge.resources.items():
            if not _RESOURCE.fullmatch(request := f"{name}={value}"):
                message = f"{request!r} is not a resource request"
                yield Mistake(f"sge.resources.{name}", message)
        if sge.slots is not None and sge.slots < tasks:
            message = f"{sge.slots} slots are too few for {tasks} tasks"
            hint = "remove it: the number follows from 'tasks'"
            yield Mistake("sge.slots", message, hint, "tasks")
        needing = [kind for kind, group in description.tasks.items() if group.gpus]
        requests = (*sge.resources, *sge.options)
        if needing and not any(map(_GPU_RESOURCE.fullmatch, requests)):
            message = "the tasks need GPUs, but the job asks for none"
            hint = "sge: {resources: {gpu: 1}}, under the site's name: `qconf -sc`"
            yield Mistake("sge", message, hint, f"tasks.{needing[0]}.gpus", fatal=False)

    def is_inside(self, env: Mapping[str, str]) -> bool:
        """Whether it is a job script's; ``JOB_ID`` alone is set by others, too."""
        return "JOB_ID" in env and "SGE_TASK_ID" in env

    def directives(
        self, description: Description, sge: SgeSettings, launcher: LauncherCommand
    ) -> Iterator[str]:
        yield from (f"#$ {line}" for line in _requests(description, sge))
        yield ""
        yield "#$ -S /bin/bash"
        yield "# The launcher's output; task output is in the folder logs."
        yield f"#$ -o {_log(launcher)}"
        yield "#$ -j y"
        yield "# A warning signal to the launcher before the job is killed."
        yield "#$ -notify"
        yield "# A lost host ends the run; it is not restarted silently."
        yield "#$ -r n"

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        return ("qsub", "-terse", str(script))

    def kill_argv(self, job: str) -> tuple[str, ...]:
        # With -notify, the launcher gets SIGUSR2 first. There is no faster way: a job
        # that is being deleted gets no further signal.
        return ("qdel", job)

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        hosts = hosts_with_gpus(
            granted_slots(env),
            description,
            env,
            lambda others: ask_gpus(find_program("qrsh", env), others, env),
            GPU_VARIABLES,
        )
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        own = own_names(env)
        alone = all(is_one_of(name, own) for name in granted_slots(env))
        return _JobStarter(
            own=own,
            qrsh="" if alone else find_program("qrsh", env),
            python=description.python,
        )

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """The notice that the queue gives before SIGKILL, less the time of a sweep."""
        job = queue.own_job(env)
        notice_s = queue.notice_s(env) if job is not None and job.notify else None
        return None if notice_s is None else max(1.0, notice_s - _SWEEP_S)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """Ask the qmaster: qdel, the time limit and `qmod -rj` send the same signal."""
        job = queue.own_job(env)
        if job is None:
            return None
        import psutil  # imported here: most launches end by themselves

        if job.is_rescheduled(float(psutil.Process().create_time())):
            return ExitCode.PREEMPTED
        return ExitCode.TIME_LIMIT if job.is_over_time(time.time()) else None

    def array_index(self, env: Mapping[str, str]) -> str | None:
        index = env.get("SGE_TASK_ID", "undefined")
        return None if index == "undefined" else index

    def harmless_signals(self, description: Description) -> frozenset[signal.Signals]:
        """SIGUSR1 of -notify before a suspension, unless s_rt sends it, too."""
        sge = self.settings_in(description)
        words = (*sge.resources, *sge.options)
        limited = any(word.startswith("s_rt") for word in words)
        return frozenset() if limited else frozenset({signal.SIGUSR1})


def sge_slots(description: Description, sge: SgeSettings) -> int:
    return sge.slots or len(description.task_ids())


def _requests(description: Description, sge: SgeSettings) -> Iterator[str]:
    name = description.name
    if not _PLAIN.fullmatch(name):
        problem = f"{name!r} cannot be used in a directive of qsub"
        raise ConfigError([Problem("name", problem)])
    # For Grid Engine, a name must not begin with a digit.
    yield f"-N j{name}" if name[0].isdigit() else f"-N {name}"
    if sge.parallel_environment is None:
        raise ConfigError(
            [
                Problem(
                    description.origins.get("sge") or description.source,
                    "sge.parallel_environment is not set: without one a job has a "
                    "single slot",
                    "`qconf -spl` lists those of this cluster",
                )
            ]
        )
    yield f"-pe {sge.parallel_environment} {sge_slots(description, sge)}"
    if sge.queue is not None:
        yield f"-q {sge.queue}"
    yield from (f"-l {name}={value}" for name, value in sge.resources.items())
    yield from lines(sge.options)


def _log(launcher: LauncherCommand) -> str:
    log = str(launcher.log)
    if not _PATH.fullmatch(log):
        hint = (
            "set TFCLUSTER_STATE_DIR to a path of letters, digits and . _ + @ = , % ~ "
            "/ -"
        )
        message = f"qsub does not accept the path {log!r}"
        raise ConfigError([Problem("state folder", message, hint)])
    return log


def ask_gpus(
    qrsh: str, hosts: Sequence[str], env: Mapping[str, str]
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on other hosts, from a qrsh task on each. Raises StartError."""
    shell = ("/bin/sh", "-c", gpu_question(GPU_VARIABLES))
    return gpus_on(
        hosts, lambda host: qrsh_argv(qrsh, host, shell), env, GPU_VARIABLES, meaning
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobStarter:
    own: tuple[str, ...]
    """The names of this host."""
    qrsh: str
    python: Interpreter

    def start_agent(self, host: Host) -> AgentChannel:
        if is_one_of(host.name, self.own):
            return ProcessChannel(host.name, shielded(process_channel.agent_argv()))
        argv = qrsh_argv(self.qrsh, host.name, agent_argv(host.python or self.python))
        channel = start_process(host.name, argv)
        send_agent(channel, host)
        return channel


def slots_by_host(where: str, text: str) -> dict[str, int]:
    """Host -> slots, in the file's order, with names exactly as in the file.

    A line is ``HOST SLOTS [QUEUE@HOST [PROCESSORS]]`` (sge_pe(5)): the queue and the
    processors (``UNDEFINED`` or ``0,1:0,2``) are not needed here, and some variants
    leave them out. A host with slots in several queues has a line for each, so slots
    are summed. Raises ConfigError, about ``where``, for another text.
    """
    slots: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        shown = f"line {number}: {line[:80]!r}"
        if len(words) < 2:
            problem = f"{shown} has too few fields: expected HOST SLOTS"
        elif host_name_problem(words[0]):
            problem = f"{shown} does not begin with a host name"
        elif not _COUNT.fullmatch(words[1]):
            problem = f"{shown}: the second field is not a number of slots"
        else:
            slots[words[0]] += int(words[1])
            continue
        raise ConfigError([Problem(where, problem, _STALE)])
    granted = {name: count for name, count in slots.items() if count}
    if not granted:
        raise ConfigError([Problem(where, "lists no host with slots", _STALE)])
    return granted


def granted_slots(env: Mapping[str, str]) -> dict[str, int]:
    """Host -> slots, in the scheduler's order. Raises StartError or ConfigError."""
    SCHEDULER.require_inside(env)
    if path := env.get("PE_HOSTFILE"):
        text = host_file("PE_HOSTFILE", path, _STALE)
        return slots_by_host(f"PE_HOSTFILE={path!r}", text)
    if env.get("PE"):
        problem = f"is not set, but the job is a parallel one: PE={env['PE']}"
        raise ConfigError([Problem("PE_HOSTFILE", problem, _STALE)])
    # Submitted without -pe: one slot on one host.
    return {own_names(env)[0]: 1}


SCHEDULER = SgeScheduler()

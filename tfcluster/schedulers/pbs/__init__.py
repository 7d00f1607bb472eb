"""PBS: OpenPBS, PBS Professional, Torque. Hosts from PBS_NODEFILE; TM starts agents.

The agent on the host of the job's script is a child process, as with ``local``. OpenPBS
and PBS Professional answer in JSON; Torque's qstat knows only ``key = value``.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfcluster.base.durations import clock, time_limit_s
from tfcluster.base.errors import ExitCode
from tfcluster.plan.model import Allocation, Description
from tfcluster.protocol.wire import loads
from tfcluster.schedulers.base import (
    Ask,
    BatchScheduler,
    CommandAnswer,
    JobPhase,
    JobState,
    LauncherCommand,
    SchedulerError,
    asker,
    one_line,
    placeholders,
    setting,
)
from tfcluster.schedulers.file_starter import FileStarter, ask_gpus
from tfcluster.schedulers.job_hosts import (
    host_file,
    hosts_with_gpus,
    require_host_names,
)
from tfcluster.schedulers.options import (
    ARRAY,
    BASH,
    ENVIRONMENT,
    FOLLOWS,
    OTHER_USER,
    OUTPUT,
    RESTART,
    SCRIPT,
    WORKDIR,
    Mistake,
    OptionTable,
    lines,
)
from tfcluster.schedulers.script import into_log

_ASK_S = 3.0
_SWEEP_S = 5.0
_KILL_DELAY_S = 10.0
"""The queue attribute kill_delay, if a queue does not set it."""
_STALE = "start a new shell, or `unset PBS_JOBID PBS_NODEFILE`, outside of a job"


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsSettings:
    """What is requested from PBS. The number of tasks follows from `tasks`."""

    nodes: int | None = setting("count", "Chunks of -l select, each on its own host.")
    tasks_per_node: int | None = setting("count", "At most this many tasks on each.")
    cpus_per_task: int | None = setting("count", "ncpus for each task.")
    mem: str | None = setting("memory", "mem of each chunk, as 16G.")
    gpus_per_node: int | None = setting(
        "gpus", "ngpus of each chunk. Default: what `gpus` of the tasks needs."
    )
    queue: str | None = setting("word", "qsub -q.", option="-q")
    account: str | None = setting("word", "qsub -A.", option="-A")
    time: str | None = setting("time", 'walltime: as 4h, or "HH:MM:SS".')
    options: tuple[str, ...] = setting(
        "options", "More options of qsub, one word per item.", ()
    )


_EXAMPLE = """\
backend: pbs                     # `tfcluster launch` submits a job, or uses its own
pbs:
  nodes: 2                       # the tasks below are divided among them
  time: 1h
  # mem: 16G                     # of each node
  # cpus_per_task: 8
  # queue: workq
  # account: x
  # options: ["-l", "place=excl"]  # any other options of qsub
"""
_OPTIONS = OptionTable(
    command="qsub",
    short=True,
    plain=re.compile(r"[A-Za-z0-9_./+@=,:%*-]+"),
    denied={
        **dict.fromkeys(("-J", "-t"), ARRAY),
        "-C": "it would change which lines are directives",
        **dict.fromkeys(("-I", "-X", "-f"), FOLLOWS),
        "-S": BASH,
        **dict.fromkeys(("-V", "-v"), ENVIRONMENT),
        **dict.fromkeys(("-d", "-D"), WORKDIR),
        **dict.fromkeys(("-e", "-j", "-k", "-o", "-R"), OUTPUT),
        "-r": RESTART,
        "-u": OTHER_USER,
        "-z": "tfcluster reads qsub's answer",
        **dict.fromkeys(("-x", "--"), SCRIPT),
    },
)
_SIZES = ("select=", "nodes=")

_JOB_ID = re.compile(r"^([0-9]+(?:\.[A-Za-z0-9_.-]+)?)\s*$", re.MULTILINE)
_COMMAND = "qsub: |qstat: "
"""The name of a command before its message."""
_FIELD = re.compile(r"^ {4}(\S+) = (.*(?:\n\t.*)*)", re.MULTILINE)
_UNKNOWN = re.compile(r"Unknown Job Id|Job has finished", re.IGNORECASE)
_WORDS = {
    "Q": (JobPhase.PENDING, "queued"),
    "H": (JobPhase.PENDING, "held"),
    "W": (JobPhase.PENDING, "waiting"),
    "T": (JobPhase.PENDING, "moving"),
    "M": (JobPhase.PENDING, "moved"),
    "R": (JobPhase.RUNNING, "running"),
    "B": (JobPhase.RUNNING, "begun"),
    "E": (JobPhase.RUNNING, "exiting"),
    "S": (JobPhase.RUNNING, "suspended"),
    "U": (JobPhase.RUNNING, "suspended"),
    "F": (JobPhase.OVER, "finished"),
    "X": (JobPhase.OVER, "finished"),
    "C": (JobPhase.OVER, "completed"),
}
"""job_state -> what it means and a word for it."""


class PbsScheduler(BatchScheduler):
    """A host is a line of PBS_NODEFILE; it has as many slots as lines."""

    name = "pbs"
    title = "PBS"
    settings = PbsSettings
    options = _OPTIONS
    launcher = "tm"
    example = _EXAMPLE
    synonyms: Mapping[str, str] = {
        **dict.fromkeys(("select", "chunks"), "nodes"),
        "ppn": "cpus_per_task",
        "ngpus": "gpus_per_node",
    }
    advice: Mapping[str, str] = {
        "project": 'options: ["-P", "x"]',
        "resource_spec": 'options: ["-l", "select=..."]',
    }
    submit_command = "qsub"
    job_id = _JOB_ID
    prefix = _COMMAND
    hints: Mapping[str, str] = {
        "Unknown queue": "`qstat -Q` lists the queues; pbs: {queue: ...}",
        "exceeds queue": "`qstat -Qf` shows the limits of the queues",
        "Unknown resource": "`pbsnodes -a` shows what hosts have",
        "Unauthorized Request": "`qstat -Qf` shows who may use a queue",
        "cannot connect to server": "`qstat -B` checks it",
        "Connection refused": "`qstat -B` checks it",
    }
    why_no_requeue = "PBS starts no job again at its time limit"
    without_gpus = "the job has none: ask for them: `-l select=N:ngpus=M` of qsub"

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        lines = granted(env)
        asked = self.settings_in(description).tasks_per_node
        hosts = hosts_with_gpus(
            {name: asked or count for name, count in Counter(lines).items()},
            description,
            env,
            lambda others: ask_gpus(others, _argv_on(env, lines), env),
        )
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> FileStarter:
        return FileStarter(description.python, _argv_on(env, granted(env)), env)

    def expected(self, description: Description) -> Allocation:
        pbs = self.settings_in(description)
        count, slots = chunks(description, pbs)
        devices = gpus_of_chunk(description, pbs, slots) or None
        return self.granted(description, placeholders(count, slots, devices))

    def more_slots(self, tasks: int, hosts: int) -> str:
        slots = -(-tasks // hosts)
        return (
            f"ask for them: `-l select={hosts}:ncpus={slots}:mpiprocs={slots}` of qsub"
        )

    def mistakes(self, description: Description, pbs: PbsSettings) -> Iterator[Mistake]:
        tasks = len(description.task_ids())
        for index, word in enumerate(pbs.options):
            key = f"pbs.options.{index}"
            if word.startswith(("block=", "-Wblock=")):
                yield Mistake(key, "option -W block is not allowed", FOLLOWS)
            if _is_size(word) and (pbs.nodes or pbs.tasks_per_node):
                message = "the size is also set by 'pbs'"
                yield Mistake(key, message, "keep one of them", "pbs")
        count, slots = chunks(description, pbs)
        if pbs.nodes is not None and pbs.nodes > tasks:
            message = f"{pbs.nodes} nodes are too many for {tasks} tasks"
            yield Mistake("pbs.nodes", message, f"nodes: {tasks}", "tasks")
        elif count * slots < tasks:
            message = f"{count} nodes with {slots} tasks each are too few for {tasks}"
            yield Mistake("pbs.tasks_per_node", f"{message} tasks", "omit it", "tasks")

    def is_inside(self, env: Mapping[str, str]) -> bool:
        return bool(env.get("PBS_JOBID") and env.get("PBS_NODEFILE"))

    def directives(
        self, description: Description, pbs: PbsSettings, launcher: LauncherCommand
    ) -> Iterator[str]:
        yield from (f"#PBS {line}" for line in _requests(description, pbs))
        yield ""
        yield "#PBS -S /bin/bash"
        yield "# PBS would copy the output only at the end."
        yield "#PBS -j oe"
        yield "#PBS -o /dev/null"
        yield "# A lost host ends the run; it is not restarted silently."
        yield "#PBS -r n"
        yield ""
        yield from into_log(launcher)

    def state(self, job: str, ask: Ask) -> JobState:
        """The job's state; PBS forgets a job that is over unless it keeps a history."""
        facts = _job_facts(job, ask)
        if facts is None:
            return JobState(JobPhase.GONE, "gone")
        letter = str(facts.get("job_state", ""))
        phase, word = _WORDS.get(letter, (JobPhase.RUNNING, letter))
        reason = " ".join(str(facts.get("comment") or "").split()) or None
        if letter == "H":
            reason = f"`qrls {job}` releases it"
        status = facts.get("Exit_status", facts.get("exit_status"))
        if phase is JobPhase.OVER and status is not None:
            reason = f"exit status {status}"
        return JobState(phase, word, reason)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        return ("qdel", job)  # SIGTERM, and after kill_delay SIGKILL

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """The queue's kill_delay, less the time of a sweep."""
        name = env.get("PBS_QUEUE", "")
        answer = asker(env, _ASK_S)(("qstat", "-Q", "-f", "-F", "json", name))
        facts = (_section(answer, "Queue") or {}).get(name)
        if facts is None:
            return None
        delay = str(facts.get("kill_delay", ""))
        delay_s = float(delay) if delay.isdecimal() else _KILL_DELAY_S
        return max(1.0, delay_s - _SWEEP_S)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """qdel and the time limit send the same signal: compare the job's times."""
        try:
            facts = _job_facts(env.get("PBS_JOBID", ""), asker(env, _ASK_S))
        except SchedulerError:
            return None
        used, limit = (
            _walltime(facts, name) for name in ("resources_used", "Resource_List")
        )
        # resources_used is renewed every minute or two.
        over = used is not None and limit is not None and used >= limit - 120
        return ExitCode.TIME_LIMIT if over else None

    def array_index(self, env: Mapping[str, str]) -> str | None:
        return env.get("PBS_ARRAY_INDEX") or env.get("PBS_ARRAYID")


def chunks(description: Description, pbs: PbsSettings) -> tuple[int, int]:
    """How many chunks the job asks for, and how many tasks fit on each."""
    tasks = len(description.task_ids())
    if pbs.nodes is not None:
        return pbs.nodes, pbs.tasks_per_node or -(-tasks // pbs.nodes)
    slots = pbs.tasks_per_node or 1
    return -(-tasks // slots), slots


def gpus_of_chunk(description: Description, pbs: PbsSettings, slots: int) -> int:
    if pbs.gpus_per_node is not None:
        return pbs.gpus_per_node
    return slots * max(group.gpus or 0 for group in description.tasks.values())


def _requests(description: Description, pbs: PbsSettings) -> Iterator[str]:
    # A name begins with a letter, and older versions allow 15 characters.
    name = description.name if description.name[0].isalpha() else f"j{description.name}"
    yield f"-N {name[:15]}"
    if not any(map(_is_size, pbs.options)):
        count, slots = chunks(description, pbs)
        cpus = slots * (pbs.cpus_per_task or 1)
        gpus = gpus_of_chunk(description, pbs, slots)
        memory = "" if pbs.mem is None else f":mem={_memory(pbs.mem)}"
        devices = f":ngpus={gpus}" if gpus else ""
        yield f"-l select={count}:ncpus={cpus}:mpiprocs={slots}{memory}{devices}"
        placed = any(word.startswith(("place=", "-lplace=")) for word in pbs.options)
        if pbs.nodes is not None and not placed:
            yield "-l place=scatter"
    limit_s = None if pbs.time is None else time_limit_s(pbs.time)
    if limit_s is not None:
        yield f"-l walltime={clock(limit_s)}"
    if pbs.queue is not None:
        yield f"-q {pbs.queue}"
    if pbs.account is not None:
        yield f"-A {pbs.account}"
    yield from lines(pbs.options)


def _is_size(word: str) -> bool:
    return word.removeprefix("-l").startswith(_SIZES)


def _memory(text: str) -> str:
    """``16G`` as PBS writes it: 16gb; a plain number is in MB."""
    return f"{text}mb" if text.isdecimal() else f"{text.lower()}b"


def granted(env: Mapping[str, str]) -> list[str]:
    """PBS_NODEFILE: a host for each slot. Raises StartError or ConfigError."""
    SCHEDULER.require_inside(env)
    path = env["PBS_NODEFILE"]
    names = host_file("PBS_NODEFILE", path, _STALE).split()
    require_host_names(f"PBS_NODEFILE={path!r}", names, _STALE)
    return names


def _argv_on(
    env: Mapping[str, str], lines: Sequence[str]
) -> Callable[[str], tuple[str, ...]]:
    """How to run a command on a host: by name, or by the number of its first line."""
    named = shutil.which("pbs_tmrsh", path=env.get("PATH"))
    if named is not None:
        return lambda host: (named, host)
    numbered = shutil.which("pbsdsh", path=env.get("PATH")) or "pbsdsh"
    return lambda host: (numbered, "-n", str(lines.index(host)))


def _walltime(facts: Mapping[str, object] | None, name: str) -> int | None:
    """``walltime`` of a group of attributes; Torque's are ``name.walltime``."""
    facts = facts or {}
    group = facts.get(name)
    text = group.get("walltime") if isinstance(group, dict) else None
    text = text or facts.get(f"{name}.walltime")
    return time_limit_s(str(text)) if text else None


def _job_facts(job: str, ask: Ask) -> Mapping[str, Any] | None:
    """The job's attributes; None if PBS does not know it. Raises SchedulerError."""
    answer = ask(("qstat", "-x", "-f", "-F", "json", job))
    if answer.exit_code != 0 and "invalid option" in answer.stderr:
        answer = ask(("qstat", "-f", job))
        if answer.exit_code == 0:
            return {
                match[1]: match[2].replace("\n\t", "")
                for match in _FIELD.finditer(answer.stdout)
            }
    if _UNKNOWN.search(answer.stderr):
        return None
    jobs = _section(answer, "Jobs")
    if jobs is None:
        raise SchedulerError(one_line(answer, _COMMAND) or "qstat prints nothing")
    # The server's name may be longer in the answer.
    number = job.partition(".")[0]
    return next((f for k, f in jobs.items() if k.partition(".")[0] == number), None)


def _section(answer: CommandAnswer, name: str) -> dict[str, dict[str, Any]] | None:
    """``{"Jobs": {"12.server": {...}}}``; None if it is not such an answer."""
    try:
        document = loads(answer.stdout.encode())
    except ValueError:
        return None
    entries = document.get(name) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        return None
    return {str(k): v for k, v in entries.items() if isinstance(v, dict)}


SCHEDULER = PbsScheduler()

"""The interface of a scheduler: where hosts come from, and how agents start there.

A scheduler is a folder of this package, or a package that a site installs; its module
has a ``SCHEDULER``, an instance of ``Scheduler`` or ``BatchScheduler``. Whatever
differs from one scheduler to another is an attribute or a method here: no other code
asks for a scheduler's name. ``asker`` runs a scheduler's commands: without a shell,
with a deadline.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import Any

from tfcluster.base.errors import ExitCode, StartError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.model import Allocation, Description, Host
from tfcluster.schedulers.options import Mistake, OptionTable
from tfcluster.schedulers.starting import Starter


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """The result of a scheduler's command."""

    exit_code: int
    stdout: str
    stderr: str = ""


Ask = Callable[[tuple[str, ...]], CommandAnswer]
"""Runs an argv to its end. Never raises: a failure is an answer, too."""

_ASK_S = 30.0


def asker(environ: Mapping[str, str], timeout_s: float = _ASK_S) -> Ask:
    """An Ask with ``environ``, which has PATH and the controller's address."""

    def ask(argv: tuple[str, ...]) -> CommandAnswer:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="backslashreplace",
                timeout=timeout_s,
                check=False,
                env={**environ, "LC_ALL": "C"},
                # Ctrl-C must reach only us; we then tell the scheduler.
                start_new_session=True,
            )
        except FileNotFoundError:
            return CommandAnswer(127, "", f"{argv[0]} is not on the PATH")
        except OSError as error:
            return CommandAnswer(126, "", f"{argv[0]}: {error.strerror}")
        except subprocess.TimeoutExpired:
            return CommandAnswer(
                124, "", f"{argv[0]} did not answer in {timeout_s:g} s"
            )
        return CommandAnswer(done.returncode, done.stdout, done.stderr)

    return ask


def output_of(argv: tuple[str, ...], env: Mapping[str, str], timeout_s: float) -> str:
    """What a program writes to standard output; empty if it fails."""
    answer = asker(env, timeout_s)(argv)
    return answer.stdout if answer.exit_code == 0 else ""


class JobPhase(Enum):
    """How far a job is.

    ``GONE``: the scheduler does not know it, or no longer does. ``UNKNOWN``: the
    scheduler does not answer; for this, ``state`` raises SchedulerError.
    """

    PENDING = "pending"
    RUNNING = "running"
    OVER = "over"
    GONE = "gone"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.OVER, JobPhase.GONE)


@dataclass(frozen=True, slots=True)
class JobState:
    phase: JobPhase
    word: str
    """The scheduler's own term: ``PENDING``, ``Eqw``."""
    reason: str | None = None
    """Why the job is in this state, or how it ended, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherCommand:
    """What the script starts, and where its output goes; all paths are absolute."""

    folder: Path
    """The run's folder, which contains the job's input."""
    log: Path
    """The launcher's own output."""
    python: str
    """The interpreter of tfcluster."""
    root: Path | None
    """The folder that contains tfcluster; None: tfcluster is installed."""


class SchedulerError(StartError):
    """An answer that is unusable, or a refusal."""


def one_line(answer: CommandAnswer, prefix: str = "") -> str:
    """A command's message without ``prefix``, a pattern at the start of its lines."""
    text = answer.stderr.strip() or answer.stdout
    lines = (
        re.sub(f"^(?:{prefix})", "", " ".join(line.split()))
        for line in text.splitlines()
    )
    return "; ".join(dict.fromkeys(filter(None, lines)))[:300]


def setting(kind: str, about: str, default: Any = None, *, option: str = "") -> Any:
    """A field of a dataclass of settings: a key of the scheduler's section.

    ``kind`` says what values fit, see ``tfcluster.config.sections``; ``about`` explains
    the key in the schema. ``option`` is what the key stands for among the user's own
    options, which must not set it, too.
    """
    metadata = {"kind": kind, "about": about, "option": option}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


SYNONYMS = {
    "time": ("walltime", "time_limit", "timelimit", "timeout", "timeout_min"),
    "mem": ("memory", "mem_gb", "job_mem", "mem_per_node"),
    "cpus_per_task": ("cores", "cpus", "cpu", "ncpus", "job_cpu"),
    "tasks_per_node": ("ntasks_per_node", "processes_per_node", "mpiprocs", "ptile"),
    "queue": ("q", "partition"),
    "partition": ("q", "queue"),
}
"""Key of a section -> words of other software for it, if the section has that key."""


class Scheduler:
    """Provides hosts, and starts agents there.

    ``env`` is the environment of the process that asks. Two methods are needed:
    ``allocate`` and ``starter``.
    """

    name: str
    """The word for ``backend``, and the key of the section: ``slurm``."""
    title: str
    """The name for people: ``Slurm``."""
    settings: type[Any] | None = None
    """The dataclass of the section's keys, made of ``setting``; None: no section."""
    options: OptionTable | None = None
    """Which of the user's own options are refused; None: the section takes none."""
    launcher: str = ""
    """The word for ``launcher`` that demands this way to start agents."""
    example: str = ""
    """What ``tfcluster init`` prints for it, from ``backend:`` to its section."""
    synonyms: Mapping[str, str] = {}
    """Words of other software for keys of the section, apart from ``SYNONYMS``."""
    advice: Mapping[str, str] = {}
    """Words for which the section has no key -> what to write instead."""
    option_hint: str | None = None
    """How to write an option without a key of its own; ``{}`` is its name."""
    here: bool = False
    """Whether the only host is this machine."""
    lists_hosts: bool = False
    """Whether the hosts are those that ``hosts:`` lists."""
    why_no_requeue: str = "it has no time limit"
    """Why ``restart: {on_time_limit: requeue}`` is refused, unless ``Requeuing``."""
    without_gpus: str | None = None
    """What to do if tasks need GPUs and no host says which it has."""

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        """The hosts for this run. Raises HostError, StartError or ConfigError."""
        raise NotImplementedError

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        """The starter of agents on these hosts. Raises HostError or StartError."""
        raise NotImplementedError

    def expected(self, description: Description) -> Allocation:
        """The hosts that a plan assumes before anything has been asked. Pure."""
        return self.allocate(description, {})

    def settings_in(self, description: Description) -> Any:
        """The ``settings`` in a configuration; defaults if it has no such section."""
        if self.settings is None:
            return None
        section = description.sections.get(self.name, {}).items()
        # A list in JSON is a tuple in a frozen dataclass.
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in section}
        return self.settings(**plain)

    def every_synonym(self) -> Mapping[str, str]:
        """``synonyms``, and those for keys that several schedulers have."""
        keys = getattr(self.settings, "__dataclass_fields__", {})
        shared = {
            w: key for key, words in SYNONYMS.items() if key in keys for w in words
        }
        return {**shared, **self.synonyms}

    def mistakes(self, description: Description, settings: Any, /) -> Iterator[Mistake]:
        """What ``settings`` say against the tasks, apart from refused options."""
        yield from ()

    def more_slots(self, tasks: int, hosts: int) -> str | None:
        """How to get enough slots for ``tasks`` tasks on so many hosts."""
        return None

    def reaches(self, other: Scheduler) -> bool:
        """Whether its starter reaches the hosts of ``other``."""
        return other is self

    def granted(self, description: Description, hosts: Sequence[Host]) -> Allocation:
        """An allocation of these hosts, with advice if they do not suffice."""
        return Allocation(
            hosts=tuple(hosts),
            more_slots=self.more_slots(len(description.task_ids()), len(hosts)),
            more_gpus=self.without_gpus,
        )


class BatchScheduler(Scheduler):
    """A scheduler with a queue: hosts belong to a job, which tfcluster may submit.

    Besides those of ``Scheduler``, it needs ``is_inside``, ``directives``, ``state``
    and ``kill_argv``. The others have defaults for a scheduler that tells nothing.
    """

    submit_command: str
    """The program that submits: ``sbatch``."""
    job_id: re.Pattern[str]
    """A line of its answer; the first group is the job's id."""
    prefix: str = ""
    """A pattern of what its commands write before a message."""
    hints: Mapping[str, str] = {}
    """Words of its refusals -> what to do."""

    def require_inside(self, env: Mapping[str, str]) -> None:
        """Raise StartError outside of one of its allocations."""
        if not self.is_inside(env):
            hint = f"`tfcluster submit`, or launch in a job of {self.submit_command}"
            raise StartError(f"not inside a job of {self.title}", hint=hint)

    def is_inside(self, env: Mapping[str, str], /) -> bool:
        """Whether ``env`` is the environment of one of its allocations."""
        raise NotImplementedError

    def directives(
        self, description: Description, settings: Any, launcher: LauncherCommand, /
    ) -> Iterator[str]:
        """The lines of the job script that say what the job needs. Pure.

        Raises ConfigError for values that it cannot hold.
        """
        raise NotImplementedError

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        return (self.submit_command, str(script))

    def submit(self, script: Path, ask: Ask) -> str:
        """Queue the script; returns the job's id. Raises SchedulerError.

        The last line that is an id counts: hooks of a site may print other lines.
        """
        answer = ask(self.submit_argv(script))
        ids = [match[1] for match in self.job_id.finditer(answer.stdout)]
        if answer.exit_code == 0 and ids:
            return ids[-1]
        message = one_line(answer, self.prefix) or "no answer"
        hint = next(
            (hint for word, hint in self.hints.items() if word in message), None
        )
        raise SchedulerError(
            f"{self.submit_command} refused the job: {message}", hint=hint
        )

    def state(self, job: str, ask: Ask) -> JobState:
        """How far the job is. Raises SchedulerError if there is no usable answer."""
        raise NotImplementedError

    def cancel_argvs(self, job: str) -> Sequence[tuple[str, ...]]:
        """Commands, run in turn, by which the launcher in the job stops its tasks."""
        return (self.kill_argv(job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        """The command that ends a job at once."""
        raise NotImplementedError

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """Seconds from the scheduler's warning to its SIGKILL; None: unknown."""
        return None

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """Why the scheduler ends the job: preemption or time limit; None: it does not.

        Called when the launcher has received SIGTERM; takes a few seconds at most.
        """
        return None

    def array_index(self, env: Mapping[str, str]) -> str | None:
        """The index of this element of a job array; None: not in an array."""
        return None

    def harmless_signals(self, description: Description) -> frozenset[signal.Signals]:
        """Signals of the scheduler that do not announce the end of the job."""
        return frozenset()


class Requeuing:
    """Also a base of a scheduler that can start a job again that has ended."""

    def job(self, env: Mapping[str, str]) -> str:
        """The id of the job that we are in."""
        raise NotImplementedError

    def is_started_again(self, env: Mapping[str, str]) -> bool:
        """Whether the job has run before."""
        raise NotImplementedError

    def require_requeuable(self, env: Mapping[str, str]) -> None:
        """Raise StartError if the scheduler would not start the job again."""
        raise NotImplementedError

    def requeue(self, env: Mapping[str, str]) -> str | None:
        """Have the scheduler end the job and start it again; returns why it refuses.

        None: it obeys, and will soon tell this process to end.
        """
        raise NotImplementedError


def placeholders(
    count: int, slots: int | None, gpus: int | None = None
) -> tuple[Host, ...]:
    """Hosts that stand for those that a scheduler will choose: ``<node 1>``."""
    devices = None if gpus is None else tuple(map(str, range(gpus)))
    names = [f"<node {number}>" for number in range(1, count + 1)]
    return tuple(Host(name=name, slots=slots, gpus=devices) for name in names)


def gpus_of_all(description: Description) -> int | None:
    """How many GPUs the tasks need together; None: none of them asks for any."""
    return sum((g.gpus or 0) * g.count for g in description.tasks.values()) or None

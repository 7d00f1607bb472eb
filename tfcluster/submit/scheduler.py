"""The protocol of a batch scheduler, and the types of its answers. Pure.

A scheduler is a set of pure functions: from Description to script, from question to
argv, from answer to meaning. Other modules run the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from tfcluster.model import Description


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a scheduler's command."""

    exit_code: int
    stdout: str
    stderr: str = ""


class JobPhase(Enum):
    """How far a job is. ``GONE``: the scheduler does not know it, or no longer does."""

    PENDING = "pending"
    RUNNING = "running"
    OVER = "over"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class JobState:
    phase: JobPhase
    word: str
    """The scheduler's own term: ``PENDING``, ``Eqw``."""
    reason: str | None = None
    """Why the job is in this state, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What the script starts, and where its output goes; all paths are absolute."""

    run: str
    """The run id; the job's name is the Description's name."""
    folder: Path
    """The run's folder, which contains the job's input."""
    log: Path
    """The launcher's own output."""
    python: str
    """The interpreter of tfcluster."""
    root: Path | None
    """The folder that contains tfcluster; None: tfcluster is installed."""


class SchedulerError(ValueError):
    """An answer that is unusable; ``message`` and ``hint`` are for people."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Scheduler(Protocol):
    """One batch scheduler. No method has side effects."""

    @property
    def name(self) -> str:
        """The scheduler's display name: ``Slurm``, ``Grid Engine``."""

    def is_inside(self, environ: Mapping[str, str]) -> bool:
        """Whether ``environ`` is the environment of one of its allocations."""

    def render(self, description: Description, launcher: Launcher) -> str:
        """The script to submit. Raises ConfigError for values it cannot hold."""

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        """The command that submits ``script`` and prints the job id."""

    def parse_job_id(self, answer: Answer) -> str:
        """The id in the answer to ``submit_argv``. Raises SchedulerError."""

    def state_argv(self, job: str) -> tuple[str, ...]:
        """The command that asks for a job's state."""

    def parse_state(self, job: str, answer: Answer) -> JobState:
        """The answer to ``state_argv``. Raises SchedulerError if it is unusable."""

    def accounting_argv(self, job: str) -> tuple[str, ...] | None:
        """The command that asks how a ``GONE`` job ended; None: there is none."""

    def parse_accounting(self, answer: Answer) -> str | None:
        """How the job ended, in a few words; None: unknown, perhaps only for now."""

    def cancel_argvs(self, job: str, *, now: bool) -> tuple[tuple[str, ...], ...]:
        """The commands that end a job, to be run in turn, ignoring failures.

        Without ``now``, they tell the launcher in the job to stop its tasks in order.
        """

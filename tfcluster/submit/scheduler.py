"""What a batch scheduler is asked and what it answers; nothing here asks it.

A scheduler is a set of pure functions: description to script, question to argv, answer
to meaning. Who runs the argv, and when, is not known here.
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
    """What a command of the scheduler ended with."""

    exit_code: int
    stdout: str
    stderr: str = ""


class JobPhase(Enum):
    """How far a job is. ``GONE``: the scheduler does not know it (any more)."""

    PENDING = "pending"
    RUNNING = "running"
    OVER = "over"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class JobState:
    phase: JobPhase
    word: str
    """The scheduler's own word: ``PENDING``, ``Eqw``."""
    reason: str | None = None
    """Why it is in this state, as people should read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What the script starts, and where its words go; all paths absolute."""

    run: str
    """The run id; the job's name is the description's."""
    folder: Path
    """The run's folder, which holds what is handed over."""
    log: Path
    """The launcher's own output."""
    python: str
    """The interpreter that tfcluster runs under."""
    root: Path | None
    """The folder to find tfcluster in, where the interpreter does not know it."""


class SchedulerError(ValueError):
    """An answer that cannot be used; ``message`` and ``hint`` are for people."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Scheduler(Protocol):
    """One batch scheduler. No method has an effect."""

    @property
    def name(self) -> str:
        """As its users write it: ``Slurm``, ``Grid Engine``."""

    def is_inside(self, environ: Mapping[str, str]) -> bool:
        """Whether ``environ`` is that of an allocation of this scheduler."""

    def render(self, description: Description, launcher: Launcher) -> str:
        """The script to submit. Raises ConfigError for values it cannot hold."""

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        """Submits ``script`` and prints the job id."""

    def parse_job_id(self, answer: Answer) -> str:
        """The id in the answer to ``submit_argv``. Raises SchedulerError."""

    def state_argv(self, job: str) -> tuple[str, ...]:
        """Asks how a job stands."""

    def parse_state(self, job: str, answer: Answer) -> JobState:
        """The answer to ``state_argv``. Raises SchedulerError: no answer at all."""

    def books_argv(self, job: str) -> tuple[str, ...] | None:
        """Asks how a job has ended that is ``GONE``; None: there is nobody to ask."""

    def parse_books(self, answer: Answer) -> str | None:
        """How it ended, in a few words; None: nothing is written of it (yet)."""

    def cancel_argvs(self, job: str, *, now: bool) -> tuple[tuple[str, ...], ...]:
        """Ends a job, pending or running: these commands in turn, failures ignored.

        Without ``now`` the launcher in it is told to stop its tasks in order.
        """

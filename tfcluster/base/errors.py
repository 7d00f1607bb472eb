"""The errors that tfcluster raises, for people to read.

    TfclusterError            a message, a hint (what to do next), an exit code
      ConfigError         2   bad configuration or usage: every problem at once
      HostError           3   a host is not reachable or not trusted
      StartError          4   start-up failed
      ContactLostError    5   contact with a host or an agent was lost
      ActiveRunError      7   the run is already active
      ResourceError       8   the launcher lacks a resource, or tfcluster has a bug

Any module may raise them; only ``cli`` catches them. Exit codes are part of the
contract: never 99 (Grid Engine would requeue the job) and never 255 (ssh's own errors).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """The exit statuses of the ``tfcluster`` command."""

    OK = 0
    TASK_FAILED = 1
    USAGE = 2
    HOST = 3
    START = 4
    CONTACT_LOST = 5
    NO_PROGRESS = 6
    ACTIVE_RUN = 7
    RESOURCES = 8
    PREEMPTED = 75
    TIME_LIMIT = 124
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class TfclusterError(Exception):
    """A failure that a person can act on: what happened, and what to do next."""

    exit_code: ExitCode = ExitCode.TASK_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def sentence(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def lines(self) -> list[str]:
        """The error as the user sees it, one entry per line."""
        lines = [f"error: {self.message}"]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return lines


class Problem(NamedTuple):
    """One finding in a configuration, and where: file:line:column, flag or variable."""

    where: str
    message: str
    hint: str | None = None
    warning: bool = False

    def __str__(self) -> str:
        kind = "warning" if self.warning else "error"
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.where}: {kind}: {self.message}{hint}"


class ConfigError(TfclusterError):
    """Every problem of a configuration or command line, found in one pass."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

    def lines(self) -> list[str]:
        return [str(problem) for problem in self.problems]


class HostError(TfclusterError):
    exit_code = ExitCode.HOST


class StartError(TfclusterError):
    exit_code = ExitCode.START


class ContactLostError(TfclusterError):
    exit_code = ExitCode.CONTACT_LOST


class ActiveRunError(TfclusterError):
    exit_code = ExitCode.ACTIVE_RUN


class ResourceError(TfclusterError):
    exit_code = ExitCode.RESOURCES

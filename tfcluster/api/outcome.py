"""How a run ended."""

from __future__ import annotations

from typing import cast

from tfcluster.console.sanitise import sanitise_word, settle
from tfcluster.documents.run import Status, TaskFailure
from tfcluster.errors import ExitCode, TfclusterError

_SHOWN_LINES = 10


class Outcome(int):
    """The exit code with which ``tfcluster launch`` would exit, and the reason for it.

    It is an ``int``: ``sys.exit(run.wait())`` ends a script as the run ended, and 0 is
    success.
    """

    status: Status
    """The final state of the run."""

    def __new__(cls, status: Status) -> Outcome:
        outcome = super().__new__(cls, status["exit_code"] or 0)
        outcome.status = status
        return outcome

    def __reduce__(self) -> tuple[type[Outcome], tuple[Status]]:
        return Outcome, (self.status,)

    @property
    def exit_code(self) -> int:
        return int(self)

    @property
    def run(self) -> str:
        """The run id."""
        return self.status["run"]

    @property
    def state(self) -> str:
        """``succeeded``, ``failed``, ``stopped`` or ``lost``."""
        return self.status["state"]

    @property
    def succeeded(self) -> bool:
        return self.state == "succeeded"

    @property
    def first_failure(self) -> TaskFailure | None:
        return self.status["first_failure"]

    @property
    def cause(self) -> str | None:
        """Why the run did not succeed, in one sentence; None if unknown."""
        failure = self.first_failure
        return failure["cause"] if failure else self.status["reason"]

    def check(self) -> Outcome:
        """The outcome itself. Raises RunFailedError unless the run succeeded."""
        if not self.succeeded:
            raise RunFailedError(self)
        return self

    def __repr__(self) -> str:
        cause = f", cause={self.cause!r}" if self.cause else ""
        return f"Outcome(exit_code={int(self)}, state={self.state!r}{cause})"

    __str__ = __repr__


class RunFailedError(TfclusterError):
    """A run did not succeed; names the first failure and its task's last lines."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(
            "\n".join(_words(outcome)),
            hint=f"tfcluster logs {outcome.run}",
        )
        # A program may end with a code that has no name.
        self.exit_code = cast("ExitCode", int(outcome) or int(ExitCode.TASK_FAILED))

    def __reduce__(self) -> tuple[type[RunFailedError], tuple[Outcome]]:
        return RunFailedError, (self.outcome,)


def _words(outcome: Outcome) -> list[str]:
    failure = outcome.first_failure
    if failure is None:
        why = f": {outcome.cause}" if outcome.cause else ""
        return [f"{outcome.run} {_ended(outcome)}{why}"]
    place = " on ".join(filter(None, (failure["task"], failure["host"])))
    cause = sanitise_word(failure["cause"])
    tail = failure["log_tail"][-_SHOWN_LINES:]
    return [
        f"{outcome.run} {_ended(outcome)}: {place}: {cause}",
        *(f"    {sanitise_word(settle(line))}" for line in tail),
    ]


def _ended(outcome: Outcome) -> str:
    """``failed``, ``was stopped`` or ``was lost``."""
    return "failed" if outcome.state == "failed" else f"was {outcome.state}"

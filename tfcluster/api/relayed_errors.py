"""Carries errors from the launcher's process to the one that asked for the run."""

from __future__ import annotations

from typing import Any

from tfcluster import errors
from tfcluster.errors import ConfigError, ExitCode, Problem, TfclusterError


def to_plain(error: TfclusterError) -> dict[str, Any]:
    """The error as JSON types."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {
        "kind": next(kinds).__name__,
        "message": error.message,
        "hint": error.hint,
        "code": int(error.exit_code),
        "problems": [list(problem) for problem in error.problems]
        if isinstance(error, ConfigError)
        else [],
    }


def from_plain(found: dict[str, Any]) -> TfclusterError:
    """The original error: of the same class, with the same words and exit code."""
    kind = getattr(errors, found["kind"])
    error: TfclusterError
    if kind is ConfigError:
        error = ConfigError([Problem(*problem) for problem in found["problems"]])
    else:
        error = kind(found["message"], hint=found["hint"])
    error.exit_code = ExitCode(found["code"])
    return shown(error)


def shown(error: TfclusterError) -> TfclusterError:
    """The error, with its hint in what Python prints (from Python 3.11 on)."""
    if error.hint and hasattr(error, "add_note"):
        error.add_note(f"hint: {error.hint}")
    return error

"""An evaluator with the program of the ranks must not train: it has their files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tfcluster.runtime.contract import Place
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.keras import patches


def refuse_training() -> None:
    """Make ``fit`` raise CollectiveError."""
    patches.TABLE.install({patches.MODEL_FIT: _refuse}, Place.STRATEGY, always=True)


def _refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    raise CollectiveError(
        "the evaluator runs the program of the ranks, and trains: it would write over "
        "the files of the chief. Give it a command of its own, such as 'tasks: "
        "{evaluator: {command: python evaluate.py}}', or let the program do something "
        "else where TF_CONFIG's task is 'evaluator'"
    )

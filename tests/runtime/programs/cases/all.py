# As people write scripts: without types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""The cases of all themes, in one process: to start one costs as much as a case."""

from __future__ import annotations

from tests.runtime.programs.cases import (
    callbacks,
    changed_gradients,
    inputs,
    loops,
    losses,
    metrics,
    models,
    optimizers,
    states,
    step_metrics,
)
from tests.runtime.programs.cases.tools import main

if __name__ == "__main__":
    themes = [
        callbacks,
        changed_gradients,
        inputs,
        loops,
        losses,
        metrics,
        models,
        optimizers,
        states,
        step_metrics,
    ]
    main({name: value for theme in themes for name, value in vars(theme).items()})

"""Where a task is in its training, one word for each detail. Pure."""

from __future__ import annotations

from tfcluster.record.run_status import FitView, TaskView

_LOSS = "loss"


def epoch_text(fit: FitView | None) -> str:
    """``3/12``; ``3`` if the number of epochs is unknown."""
    return "" if fit is None else _of(fit.epoch, fit.epochs)


def step_text(task: TaskView) -> str:
    """``17/23`` in an epoch; otherwise the number of all steps."""
    if task.fit is not None and task.fit.epoch_step is not None:
        return _of(task.fit.epoch_step, task.fit.epoch_steps)
    return "" if task.step is None else str(task.step)


def loss_text(task: TaskView) -> str:
    """``0.3125``; ``nan`` for a value that is not a finite number."""
    if _LOSS not in task.metrics:
        return ""
    loss = task.metrics[_LOSS]
    return "nan" if loss is None else f"{loss:.4g}"


def _of(part: int, whole: int | None) -> str:
    return str(part) if whole is None else f"{part}/{whole}"

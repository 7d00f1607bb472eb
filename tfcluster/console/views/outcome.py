"""How a run ended: one line per task, with the first failure marked. Pure."""

from __future__ import annotations

from pathlib import PurePath

from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.style import PLAIN, Style
from tfcluster.console.text import duration, fold_tasks, table
from tfcluster.console.views.failures import how_it_ended
from tfcluster.record.run_status import RunView, TaskView
from tfcluster.states import TaskState

_ROWS = 40


def outcome(view: RunView, style: Style = PLAIN) -> list[str]:
    """The table at the end: task, host, exit, time.

    If there are very many tasks, only failed and lost ones are listed, up to a limit.
    """
    first = view.first_failure.task if view.first_failure else None
    shown = view.tasks
    if len(shown) > _ROWS:
        shown = tuple(t for t in shown if t.state in (TaskState.FAILED, TaskState.LOST))
        shown = tuple(sorted(shown, key=lambda task: task.task != first))[:_ROWS]
    listed = {task.task for task in shown}
    rest = [task for task in view.tasks if task.task not in listed]
    rows = [_row(task, first) for task in shown]

    def paint(row: int, column: int, cell: str) -> str:
        if row < 0:
            return style.dim(cell)
        if column == 2:
            return _coloured(shown[row], cell, style)
        return style.red(cell) if column == 4 else cell

    lines = table(rows, ("task", "host", "end", "time", ""), right=(3,), paint=paint)
    return lines + [
        f"{fold_tasks(names)}: {state}" for state, names in _by_state(rest).items()
    ]


def where_logs_are(view: RunView, style: Style = PLAIN) -> list[str]:
    """The folder of the logs, unless a failure already shows it."""
    if view.first_failure is not None or not view.tasks or not view.tasks[0].log:
        return []
    folder = sanitise_word(str(PurePath(view.tasks[0].log).parent))
    return [style.dim(f"logs: {folder} (tfcluster logs {sanitise_word(view.run)})")]


def _row(task: TaskView, first: str | None) -> tuple[str, ...]:
    return (
        sanitise_word(task.task),
        sanitise_word(task.host or ""),
        _end(task),
        duration(task.seconds) if task.seconds is not None else "",
        "<- first failure" if task.task == first else "",
    )


def _end(task: TaskView) -> str:
    """``succeeded``, ``failed, exit 3``, or just ``stopped``: the signal was ours."""
    fate = how_it_ended(task.exit_code, task.signal)
    if task.state is TaskState.FAILED and fate:
        return f"{task.state}, {fate}"
    return task.state_words


def _coloured(task: TaskView, cell: str, style: Style) -> str:
    if task.state in (TaskState.FAILED, TaskState.LOST):
        return style.red(cell)
    return style.green(cell) if task.state is TaskState.SUCCEEDED else cell


def _by_state(tasks: list[TaskView]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(task.state_words, []).append(sanitise_word(task.task))
    return found

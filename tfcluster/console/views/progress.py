"""The live text of a run: what it waits for, and how fast it trains. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tfcluster.base.states import RunState, TaskState
from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.text import clock, fold_tasks, is_rank, plural
from tfcluster.console.views.status import epoch_text, loss_text, step_text
from tfcluster.plan.host_patterns import fold
from tfcluster.record.run_status import HostView, RunView, TaskView

_NAMED = 3
_WAIT_WORTH_NAMING = 0.05


def live_text(view: RunView, now_s: float) -> str:
    if view.state is RunState.STARTING:
        return starting(view, now_s)
    if view.state is RunState.STOPPING:
        return stopping(view, now_s)
    return running(view, now_s)


def starting(view: RunView, now_s: float) -> str:
    hosts = [host for host in view.hosts if host.state in ("pending", "starting")]
    if hosts and not any(_is_up(task) or task.phase for task in view.tasks):
        doing = [(_host_doing(host), host.since_s, host.host) for host in hosts]
        return _waiting(doing, fold, plural(len(view.hosts), "host"), now_s)
    tasks = [task for task in view.tasks if not _is_up(task)]
    if not tasks:
        return "starting"
    doing = [(task.phase or str(task.state), task.since_s, task.task) for task in tasks]
    return _waiting(doing, fold_tasks, plural(len(view.tasks), "task"), now_s)


def _waiting(
    doing: Sequence[tuple[str, float | None, str]],
    fold_names: Callable[[list[str]], str],
    total: str,
    now_s: float,
) -> str:
    """Who does what since when, by what it is; the longest-lasting group first."""
    names: dict[str, list[str]] = {}
    oldest: dict[str, float] = {}
    for what, since_s, name in doing:
        names.setdefault(what, []).append(name)
        if since_s is not None:
            oldest[what] = min(since_s, oldest.get(what, since_s))
    groups = []
    for what in sorted(names, key=lambda what: oldest.get(what, float("inf"))):
        since = f", {max(0, int(now_s - oldest[what]))} s" if what in oldest else ""
        groups.append(sanitise_word(f"{fold_names(names[what])} {what}") + since)
    shown = groups[:_NAMED] + ["…"] * (len(groups) > _NAMED)
    return f"waiting for {len(doing):,} of {total}: {'; '.join(shown)}"


def running(view: RunView, now_s: float) -> str:
    """``running 2:31  step 1200  41.5 steps/s  waiting 12 %  (slowest worker:2)``.

    In ``fit``: ``running 2:31  epoch 3/12  step 17/23  loss 0.312  41.5 steps/s  0:05
    left``.
    """
    since_s = view.since_s if view.since_s is not None else view.started_s
    parts = [f"running {clock(now_s - (since_s or now_s))}"]
    training = [task for task in view.tasks if task.step is not None]
    ended = [task for task in view.tasks if task.state.final]
    if training:
        import statistics  # imported here: it takes long, and few runs need it at once

        last = min(training, key=lambda task: task.step or 0)
        parts += [f"epoch {epoch_text(last.fit)}"] if last.fit else []
        parts.append(f"step {step_text(last)}")
        loss = loss_text(training[0])
        parts += [f"loss {loss}"] if loss else []
        paces = [t.steps_per_s for t in training if t.steps_per_s is not None]
        if paces:
            pace = statistics.median(paces)
            parts.append(f"{pace:.3g} steps/s" if pace < 1 else f"{pace:.1f} steps/s")
        waits = [t.wait_share for t in training if t.wait_share is not None]
        if len(waits) > 1:
            parts.append(f"waiting {statistics.fmean(waits):.0%}".replace("%", " %"))
            parts += _slowest(training)
        if left := [t.left_s for t in training if t.left_s is not None]:
            parts.append(f"{clock(max(left))} left")
    elif phases := _phases(view.tasks):
        parts.append(phases)
    if ended:
        parts.append(f"{len(ended):,} of {plural(len(view.tasks), 'task')} ended")
    return "  ".join(parts)


def stopping(view: RunView, now_s: float) -> str:
    states = (TaskState.STARTING, TaskState.RUNNING, TaskState.STOPPING)
    left = [task.task for task in view.tasks if task.state in states]
    since_s = view.since_s if view.since_s is not None else now_s
    text = f"stopping {max(0, int(now_s - since_s))} s"
    return f"{text}: waiting for {sanitise_word(fold_tasks(left))}" if left else text


def _slowest(training: Sequence[TaskView]) -> list[str]:
    """The slowest rank: ranks in step have equal speed, but the slowest waits least."""
    measured = [task for task in training if task.wait_share is not None]
    least = min(measured, key=lambda task: task.wait_share or 0.0)
    most = max(task.wait_share or 0.0 for task in measured)
    if most - (least.wait_share or 0.0) < _WAIT_WORTH_NAMING:
        return []
    return [f"(slowest {sanitise_word(least.task)})"]


def _phases(tasks: Iterable[TaskView]) -> str:
    doing: dict[str, list[str]] = {}
    for task in tasks:
        if is_rank(task.task) and task.phase and not task.state.final:
            doing.setdefault(task.phase, []).append(task.task)
    return "; ".join(
        sanitise_word(f"{fold_tasks(names)} {phase}") for phase, names in doing.items()
    )


def _is_up(task: TaskView) -> bool:
    return task.state not in (TaskState.PENDING, TaskState.STARTING)


_STAGES = {
    "copy files": "copying files",
    "set-up lines": "running set-up lines",
    "make the environment": "making the environment",
    "import TensorFlow": "importing tensorflow",
}


def _host_doing(host: HostView) -> str:
    if host.state == "starting" and host.stage in _STAGES:
        return _STAGES[host.stage]
    return {"pending": "not asked yet", "starting": "connecting"}.get(
        host.state, host.state
    )

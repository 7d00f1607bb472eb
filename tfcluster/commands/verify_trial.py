"""The program of ``verify`` and ``explain``, and a run of it that records its steps."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tfcluster import config
from tfcluster.base.states import RunState
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import RANKED_TYPES, RECORDING
from tfcluster.commands import launch
from tfcluster.commands.launch import load_file
from tfcluster.commands.stop import stop
from tfcluster.launcher.detach import detached
from tfcluster.launcher.launch import check
from tfcluster.plan.model import Description, Restart, Strategy, TaskGroup
from tfcluster.record.liveness import try_lock
from tfcluster.record.load_run import read_run, read_summary
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.run_status import RunView
from tfcluster.verify.recorded import Recorded, read
from tfcluster.verify.verdict import TrialFailure, failure

SEED = 20_220_318
"""The seed of the random generators of all trials, before the program's first line."""
_OF_A_RANK = re.compile(rf"warning: ({'|'.join(RANKED_TYPES)}):\d+: ")
_POLL_S = 0.05
_GRACE_S = 2.0
_LAUNCHER_S = 10.0
"""How long the launcher may take to close its record after the end of the run."""


@dataclass(frozen=True, slots=True)
class Trial:
    recorded: Recorded
    view: RunView
    complete: bool
    """Whether the program ended by itself."""
    folder: Path
    """The working directory of the trial."""
    copied_to: str
    """The working directory if it is a copy, otherwise empty."""
    log: Path
    """What the chief printed."""

    @property
    def warnings(self) -> list[str]:
        """The runtime's warnings about the training; other notes explain nothing."""
        return [note for note in self.view.notes if _OF_A_RANK.match(note)]

    @property
    def failure(self) -> TrialFailure | None:
        """Why the program did not succeed; None if it did, or if we stopped it."""
        if not self.complete or self.view.state is RunState.SUCCEEDED:
            return None
        first = self.view.first_failure
        if first is None:
            return TrialFailure(self.view.reason or f"the run is {self.view.state}", ())
        return failure(
            first.cause, first.log_tail, folder=self.copied_to, task=first.task or ""
        )


def described(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    count: int | None,
    ps: int = 0,
    overrides: Sequence[str],
    passed: Sequence[str],
) -> Description:
    """What a file describes, or a command on ``count`` ranks. Raises ConfigError."""
    if Path(words[0]).suffix in (".yaml", ".yml"):
        changes = {"tasks.worker": count, "tasks.ps": ps or None}
        set_here = [f"{key}={n}" for key, n in changes.items() if n is not None]
        return load_file(
            words[0],
            environ,
            overrides=[*overrides, *set_here],
            passed=passed,
            arguments=words[1:],
        )
    return launch.described(
        config.from_command(
            words,
            count=2 if count is None else count,
            ps=ps,
            overrides=overrides,
            environ=environ,
            cwd=Path.cwd(),
            passed=passed,
        )
    )


def alone(description: Description) -> Description:
    """One process, which tfcluster leaves alone, in a Python that starts as usual."""
    kind, group = _trained(description)
    runtime = replace(description.runtime, warm_start=False)
    return _here(
        replace(description, runtime=runtime),
        tasks={kind: replace(group, count=1, min=None)},
        strategy=Strategy.NONE,
    )


def on_one_rank(description: Description) -> Description:
    """One rank and the description's servers, for a program that needs servers."""
    kind, group = _trained(description)
    tasks = {kind: replace(group, count=1), "ps": description.tasks["ps"]}
    return on_ranks(replace(description, tasks=tasks))


def on_ranks(description: Description) -> Description:
    tasks = {
        kind: replace(group, min=None)
        for kind, group in description.tasks.items()
        if kind != "evaluator"
    }
    return _here(description, tasks=tasks, strategy=description.runtime.strategy)


def size_of(description: Description) -> int:
    groups = description.tasks
    return sum(groups[kind].count for kind in RANKED_TYPES if kind in groups)


def _trained(description: Description) -> tuple[str, TaskGroup]:
    for kind in RANKED_TYPES:
        if kind in description.tasks:
            return kind, description.tasks[kind]
    raise ValueError("a description has a chief or a worker")


def _here(
    description: Description, *, tasks: Mapping[str, TaskGroup], strategy: Strategy
) -> Description:
    return replace(
        description,
        named=False,
        backend="local",
        tasks=tasks,
        runtime=replace(description.runtime, strategy=strategy),
        hosts=(),
        ports=None,
        restart=Restart(),
        grace_s=_GRACE_S,
        sync=None,
    )


def run_trial(
    description: Description,
    scratch: Path,
    workdir: Path,
    *,
    steps: int | None,
    environ: Mapping[str, str],
    orphaned: Callable[[], None],
    **recorded: bool,
) -> Trial:
    """Run ``description`` in ``workdir`` until it ends or has made ``steps`` steps.

    ``scratch`` is an empty folder. ``recorded``: further fields of the ``Recording``.
    If this process dies, the run stops and calls ``orphaned``.
    """
    recording = scratch / "recording"
    recording.mkdir()
    wanted = {"folder": str(recording), "steps": steps, "seed": SEED, **recorded}
    env = {**description.env, RECORDING: json.dumps(wanted)}
    own = {**environ, "TFCLUSTER_STATE_DIR": str(scratch / "state")}
    ready = check(replace(description, env=env, workdir=workdir, on_end=()), own)
    run = detached(lambda begun: ready.run(begun, own), orphaned=orphaned)
    paths = find(state_dir(own), run)
    try:
        stopped = _await_steps(paths, recording, size_of(description))
    finally:
        stop(run, now=False, environ=own, say=lambda text: None)
        _await_launcher(paths)
    view = read_run(paths, now_s=time.time())
    return Trial(
        recorded=read(recording),
        view=view,
        complete=not stopped,
        folder=workdir,
        copied_to="" if workdir == description.workdir else str(workdir),
        log=paths.log(TaskId(_trained(description)[0], 0)),
    )


def _await_launcher(paths: RunPaths) -> None:
    lock = try_lock(paths.lock, patience_s=_LAUNCHER_S)
    if lock is not None:
        lock.release()


def _await_steps(paths: RunPaths, recording: Path, size: int) -> bool:
    """Wait for the end of the run, or until all ranks wait to be stopped (True)."""
    pause = threading.Event()
    while not read_summary(paths, now_s=time.time()).state.final:
        if len(list(recording.glob("done-*"))) == size:
            return True
        pause.wait(_POLL_S)
    return False

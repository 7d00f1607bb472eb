"""The launcher in the job: continues the run that was begun at submission."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tfcluster.base.errors import ExitCode, TfclusterError
from tfcluster.base.states import RunState
from tfcluster.console.output import say
from tfcluster.launcher.launch import check
from tfcluster.launcher.run_end import call_on_end
from tfcluster.record.continuation import latest, link, was_requeued
from tfcluster.record.events import read_events
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, create_run
from tfcluster.submit.job import JobInput, forget_secrets, read_job_input
from tfcluster.submit.job_status import settle


def run_submitted(folder: Path, environ: Mapping[str, str]) -> int:
    """Run the job in ``folder``, as a new run if requeued; returns the exit code."""
    first = RunPaths(folder)
    job_input = read_job_input(first)
    paths = _again(first, job_input) if first.events.exists() else first
    env = {**environ, "TFCLUSTER_STATE_DIR": str(job_input.state)}
    try:
        code = check(job_input.description, env, paths).run(lambda _: None, env)
    except TfclusterError as error:
        hint = f" ({error.hint})" if error.hint else ""
        settle(paths, RunState.FAILED, error.exit_code, error.message + hint)
        view = read_run(paths, now_s=time.time())
        call_on_end(job_input.description, paths, view, env)
        forget_secrets(first)
        raise
    if code != ExitCode.PREEMPTED and not was_requeued(paths):
        forget_secrets(first)
    return code


def _again(first: RunPaths, job_input: JobInput) -> RunPaths:
    before = latest(first)
    paths = create_run(job_input.state, job_input.description.name, time.time())
    for source, target in ((first.job, paths.job), (first.launched, paths.launched)):
        if document := read_json(source):
            replace_json(target, document)
    view = read_run(before, now_s=time.time())
    dead = view.state is RunState.LOST or view.unknown_since_s is not None
    if dead and all(e["type"] != "end" for e in read_events(before.events)):
        why = f"its host was lost, and its job was restarted as {paths.run}"
        settle(before, RunState.LOST, ExitCode.PREEMPTED, why)
    link(before, paths)
    say(f"the job was requeued: {paths.run} follows {before.run}")
    return paths

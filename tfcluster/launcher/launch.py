"""The steps of a launch, from a checked Description to an exit code.

Whatever can be checked is checked before the record is begun; from then on the record,
the logs and the report survive whatever happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tfcluster import __version__, schedulers
from tfcluster.base.errors import ExitCode, ResourceError, TfclusterError
from tfcluster.base.light_dataclasses import as_dict, dataclass, replace
from tfcluster.console.display import DEFAULT, Display
from tfcluster.console.text import times
from tfcluster.launcher.driver import Driver
from tfcluster.launcher.interrupts import interrupts
from tfcluster.launcher.job import CurrentJob, Item, Job, task_specs
from tfcluster.launcher.live_run import Journal, LiveRun
from tfcluster.launcher.preflight import (
    idle_hosts,
    read_secrets,
    require_commands,
    require_keras_backend,
    require_open_files,
    require_scripts,
    shared_files,
)
from tfcluster.launcher.run_end import call_on_end, is_due, requeue
from tfcluster.launcher.run_output import RunOutput
from tfcluster.launcher.workdir_listing import Listing, listing
from tfcluster.lifecycle.actions import Finish
from tfcluster.lifecycle.events import Interrupted
from tfcluster.plan.compose import Cluster, TaskSpec, provisional_cluster
from tfcluster.plan.document import plan_document, task_parts
from tfcluster.plan.model import Allocation, Description
from tfcluster.plan.placement import place
from tfcluster.record.continuation import Earlier, earlier, find_waiting, link
from tfcluster.record.events import Writer
from tfcluster.record.files import replace_json
from tfcluster.record.launched import save_launched
from tfcluster.record.liveness import acquire, identity
from tfcluster.record.metrics import MetricsWriter, most_of_series
from tfcluster.record.paths import ELSEWHERE, RunPaths, create_run, state_dir
from tfcluster.record.run_locks import hold_name
from tfcluster.record.run_status import RunView
from tfcluster.schedulers.base import BatchScheduler, Requeuing
from tfcluster.schedulers.starting import Starter

if TYPE_CHECKING:
    from tfcluster.documents.checks import SharedPlan

_FLUSH_S = 5.0
_MAX_NAME = 64
_WHY_ENDED = {
    ExitCode.TIME_LIMIT: "the scheduler ended the job: its time limit was reached",
    ExitCode.PREEMPTED: "the scheduler ended the job: it was preempted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLaunch:
    """A Description with hosts and tasks: all we know before anything starts."""

    description: Description
    allocation: Allocation
    specs: tuple[TaskSpec, ...]
    cluster: Cluster

    def document(self, logs: str) -> SharedPlan:
        return plan_document(self.description, self.allocation, self.specs, logs=logs)


def prepare(description: Description, allocation: Allocation) -> PreparedLaunch:
    """Place and compose. Raises StartError if slots, GPUs or TF_CONFIG don't fit."""
    places = place(description, allocation)
    specs = task_specs(description, places)
    return PreparedLaunch(
        description=description,
        allocation=allocation,
        specs=specs,
        cluster=provisional_cluster(specs),
    )


Begun = Callable[[RunPaths], None]


def check(
    description: Description, environ: Mapping[str, str], paths: RunPaths | None = None
) -> Launch:
    """Check all that can be checked before a start. Raises TfclusterError."""
    original, backend = description, schedulers.get(description.backend)
    scheduler = backend if isinstance(backend, BatchScheduler) else None
    requeuing = backend if isinstance(backend, Requeuing) else None
    if requeuing is not None and description.restart.requeues:
        requeuing.require_requeuable(environ)
    description, note = _within_limits(description, scheduler, environ)
    if scheduler is not None and paths is None:
        description = _of_array(description, scheduler.array_index(environ))
    prepared = prepare(description, backend.allocate(description, environ))
    if backend.here:
        programs = not description.prepares_hosts
        require_commands(prepared.specs, environ, programs=programs)
        require_open_files(prepared.specs)
    inherited = environ if backend.here else {}
    require_keras_backend(prepared.specs, inherited)
    files = None
    if description.sync is not None:
        require_scripts(prepared.specs)
        files = listing(description.workdir, description.sync)
    values = read_secrets(description.secrets, description.origins, environ)
    starter = schedulers.of_launcher(description).starter(description, environ)
    return Launch(
        original,
        prepared,
        values,
        starter,
        state_dir(environ),
        paths=paths,
        scheduler=scheduler,
        requeuing=requeuing,
        files=files,
        notes=(
            *filter(None, (note,)),
            *idle_hosts(description, prepared.allocation, prepared.specs),
            *shared_files(description, prepared.specs),
        ),
    )


def _within_limits(
    description: Description,
    scheduler: BatchScheduler | None,
    environ: Mapping[str, str],
) -> tuple[Description, str | None]:
    """The description, grace limited to what the scheduler grants, and a warning."""
    limit_s = None if scheduler is None else scheduler.longest_grace_s(environ)
    if limit_s is None or description.grace_s <= limit_s:
        return description, None
    return replace(description, grace_s=limit_s), (
        f"warning: grace is reduced from {description.grace_s:g} s to {limit_s:g} s: "
        f"after that {description.backend} kills the job"
    )


def _of_array(description: Description, index: str | None) -> Description:
    """Add the element's index to the name: job array elements are launched alike."""
    if index is None:
        return description
    end = f"-{index}"
    return replace(description, name=description.name[: _MAX_NAME - len(end)] + end)


@dataclass(frozen=True, slots=True)
class Launch:
    original: Description
    """What the user asked for, before it was fitted to the scheduler's limits."""
    prepared: PreparedLaunch
    secrets: Mapping[str, str]
    starter: Starter
    state: Path
    paths: RunPaths | None = None
    """The run, if it was already begun."""
    scheduler: BatchScheduler | None = None
    requeuing: Requeuing | None = None
    files: Listing | None = None
    notes: tuple[str, ...] = ()

    def run(
        self, begun: Begun, environ: Mapping[str, str], display: Display = DEFAULT
    ) -> int:
        """Run it; returns the exit code. Raises TfclusterError if it never began."""
        queue: SimpleQueue[Item] = SimpleQueue()
        with ExitStack() as stack:
            # From before the run exists until its end is recorded: an early signal also
            # ends the run in order, and a late one has no effect.
            signals: list[Interrupted] = []

            def post(signal: Interrupted) -> None:
                signals.append(signal)
                queue.put(signal)

            harmless = frozenset[signal.Signals]()
            if self.scheduler is not None:
                description = self.prepared.description
                harmless = self.scheduler.harmless_signals(description)
            stack.enter_context(interrupts(post, harmless))
            with ExitStack() as held:
                paths, writer = self._begin(held, environ)
                begun(paths)
                current = CurrentJob(self._job(paths))
                show = RunOutput.on_terminal(
                    current, sys.stdout, sys.stderr, environ, display
                )
                held.callback(show.close)
                show.begin(current.job)
                for note in self.notes:
                    show.say(note)
                view = self._drive(
                    current, paths, writer, show, queue, signals, environ
                )
            # The run's name is free again: the command may launch a run of that name.
            count = len(signals)
            if not view.requeued:
                description = self.prepared.description
                call_on_end(
                    description, paths, view, environ, lambda: len(signals) > count
                )
            return view.exit_code or 0

    def _job(self, paths: RunPaths) -> Job:
        return Job(
            run=paths.run,
            description=self.prepared.description,
            allocation=self.prepared.allocation,
            specs={spec.task: spec for spec in self.prepared.specs},
            secrets=self.secrets,
            token=os.urandom(32).hex(),
            logs=paths.logs,
            files=self.files,
        )

    def _begin(
        self, stack: ExitStack, environ: Mapping[str, str]
    ) -> tuple[RunPaths, Writer]:
        """Create the run's folder and first files, or remove it; take its name."""
        name = self.prepared.description.name
        before = self._continued(environ)
        paths = self.paths or create_run(self.state, name, time.time())
        try:
            with ExitStack() as undo:
                writer = self._open_record(paths, before, undo)
                stack.enter_context(undo.pop_all())
        except TfclusterError:
            if self.paths is None:
                shutil.rmtree(paths.root, ignore_errors=True)
            raise
        return paths, writer

    def _continued(self, environ: Mapping[str, str]) -> RunPaths | None:
        restart = self.prepared.description.restart
        if self.paths or not self.requeuing or not restart.requeues:
            return None
        if not self.requeuing.is_started_again(environ):
            return None
        job, name = self.requeuing.job(environ), self.prepared.description.name
        return find_waiting(self.state, job, name)

    def _open_record(
        self, paths: RunPaths, before: RunPaths | None, stack: ExitStack
    ) -> Writer:
        """Take name and lock; write files. Raises ActiveRunError or ResourceError."""
        description = self.prepared.description
        if description.named:
            name, now_s = description.name, time.time()
            hold = hold_name(self.state, name, paths.run, now_s=now_s)
            stack.callback(hold.release)
        stack.callback(acquire(paths).release)
        document = self.prepared.document(str(paths.logs))
        try:
            replace_json(paths.plan, task_parts(document, self.prepared.cluster))
            save_launched(paths, self.original)
            if before is not None:
                link(before, paths)
        except OSError as error:
            raise ResourceError(
                f"cannot write the record of the run to {paths.root}: {error.strerror}",
                hint=ELSEWHERE,
            ) from error
        writer = Writer(paths)
        stack.callback(writer.close, _FLUSH_S)
        return writer

    def _drive(
        self,
        current: CurrentJob,
        paths: RunPaths,
        writer: Writer,
        show: RunOutput,
        queue: SimpleQueue[Item],
        signals: Sequence[Interrupted],
        environ: Mapping[str, str],
    ) -> RunView:
        metrics = MetricsWriter(paths, most_of_series(len(current.job.specs)))
        journal = Journal(writer, metrics, self.prepared.document(str(paths.logs)))
        before = earlier(paths)
        journal.event("run", **_identity(current.job, before))
        if before.requeues:
            show.say(
                f"requeued after the time limit ({times(before.requeues)}): continues "
                f"{before.run}"
            )
        run = LiveRun(current, journal, show, paths)
        within_s = current.job.description.restart.within_s
        counted = before.counted(time.time(), within_s)
        driver = Driver(run, self.starter, queue, counted)
        finish, why = self._explained(driver.run(), environ)
        restart = current.job.description.restart
        if self.requeuing is not None and is_due(restart, finish, signals):

            def record(event: Mapping[str, Any]) -> None:
                journal.event("requeued", **event)
                writer.flush(_FLUSH_S)

            now, job = replace(before, restarts=tuple(driver.restarts)), current.job
            why = requeue(job.description, self.requeuing, environ, paths, now, record)
        if why is not None:
            show.say(why)
        state, code = str(finish.state), int(finish.exit_code)
        journal.event("end", state=state, exit_code=code, reason=why)
        view = journal.view()
        metrics.close(_FLUSH_S)
        if not writer.flush(_FLUSH_S):
            show.say(f"warning: the record is incomplete: {writer.trouble}")
        try:
            replace_json(paths.report, view.to_json())
        except OSError as error:
            show.say(f"warning: cannot write {paths.report}: {error.strerror}")
        show.end(view)
        return view

    def _explained(
        self, finish: Finish, environ: Mapping[str, str]
    ) -> tuple[Finish, str | None]:
        """``finish`` with the scheduler's reason as exit code, and a sentence."""
        if self.scheduler is None or finish.exit_code != ExitCode.TERMINATED:
            return finish, None
        code = self.scheduler.why_ending(environ)
        if code is None:
            return finish, None
        return replace(finish, exit_code=code), _WHY_ENDED.get(code)


def _identity(job: Job, before: Earlier) -> dict[str, Any]:
    """The first event: the run, the process that drives it, and the runs before it."""
    description = job.description
    return {
        "run": job.run,
        "name": description.name,
        "named": description.named,
        "backend": description.backend,
        "argv": list(description.command),
        "version": __version__,
        "started": time.time(),
        **as_dict(identity()),
        "follows": before.run,
        "requeues": before.requeues or None,
    }

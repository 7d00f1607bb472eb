"""Submits: begins a run, hands over what it needs, and queues a job for it.

A private file in the run's folder has the checked Description: the job needs neither
the configuration file nor the user's environment. From then on, the run exists.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from tfcluster.base.errors import StartError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.launcher.launch import prepare
from tfcluster.launcher.preflight import read_secrets
from tfcluster.plan.description_json import from_plain, to_plain
from tfcluster.plan.document import task_parts
from tfcluster.plan.model import Description, Secret
from tfcluster.record.files import open_private, read_json, replace_json, write_all
from tfcluster.record.launched import save_launched
from tfcluster.record.paths import RunPaths, create_run, state_dir
from tfcluster.record.run_locks import hold_name
from tfcluster.schedulers import batch_scheduler
from tfcluster.schedulers.base import Ask, BatchScheduler, LauncherCommand
from tfcluster.schedulers.script import job_script

INPUT = "job-input.json"
_SECRET = "secret-"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """What the launcher in the job reads."""

    description: Description
    """The Description. All its secrets are in files: the job lacks our environment."""
    state: Path
    """The state folder, which the job must see under the same path."""


def write_job_input(
    paths: RunPaths, description: Description, environ: Mapping[str, str], state: Path
) -> None:
    """Write the JobInput as private files, with secrets' values. Raises OSError."""
    secrets = dict(description.secrets)
    for name, secret in description.secrets.items():
        if secret.env is not None:
            file = paths.root / f"{_SECRET}{name}"
            write_private(file, os.fsencode(environ[secret.env]) + b"\n")
            secrets[name] = Secret(file=file)
    described = replace(description, secrets=secrets)
    job_input = JobInput(description=described, state=state)
    text = json.dumps(to_plain(job_input), indent=1) + "\n"
    write_private(paths.root / INPUT, text.encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a new private file, durably. Raises OSError."""
    descriptor = open_private(path, os.O_WRONLY | os.O_EXCL)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_job_input(paths: RunPaths) -> JobInput:
    """Read the JobInput of this run. Raises StartError."""
    path = paths.root / INPUT
    document = read_json(path)
    if document is None:
        raise StartError(
            f"{path} cannot be read here",
            hint="the state folder must be on a file system that the nodes share: "
            "TFCLUSTER_STATE_DIR",
        )
    try:
        job_input: JobInput = from_plain(JobInput, document)
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"{path} is damaged: {error!r}") from error
    return job_input


def forget_secrets(paths: RunPaths) -> None:
    """Remove the files with secrets: the job is over and will not start again."""
    for file in (paths.root / INPUT, *paths.root.glob(f"{_SECRET}*")):
        file.unlink(missing_ok=True)


SCRIPT = "job.sh"
"""The submitted script, in the run's folder."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    id: str
    scheduler: BatchScheduler
    paths: RunPaths


def launcher_at(paths: RunPaths) -> LauncherCommand:
    """What the run's script starts: this copy of tfcluster."""
    installed = PACKAGE_ROOT in (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
    return LauncherCommand(
        folder=paths.root,
        log=paths.launcher_log,
        python=sys.executable,
        root=None if installed else Path(PACKAGE_ROOT),
    )


def submit(
    description: Description,
    scheduler: BatchScheduler,
    ask: Ask,
    environ: Mapping[str, str],
) -> QueuedJob:
    """Check and queue a job for a new run. Raises TfclusterError, leaving nothing."""
    prepared = prepare(description, scheduler.expected(description))
    read_secrets(description.secrets, description.origins, environ)
    state = state_dir(environ)
    paths = create_run(state, description.name, time.time())
    try:
        if description.named:
            # The job holds the name when it runs, but a conflict is reported now.
            hold_name(state, description.name, paths.run, now_s=time.time()).release()
        script = paths.root / SCRIPT
        text = job_script(scheduler, description, launcher_at(paths))
        write_private(script, text.encode(errors="surrogateescape"))
        write_private(paths.launcher_log, b"")  # otherwise others could read it
        save_launched(paths, description)
        write_job_input(paths, description, environ, state)
        document = task_parts(prepared.document(str(paths.logs)), prepared.cluster)
        replace_json(paths.plan, document)
        job = QueuedJob(scheduler.submit(script, ask), scheduler, paths)
        replace_json(
            paths.job,
            {
                "job": job.id,
                "backend": description.backend,
                "name": description.name,
                "submitted": time.time(),
            },
        )
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return job


def find_job(paths: RunPaths) -> QueuedJob | None:
    """The job of a run; None if it was launched without one, or cannot be asked for."""
    document = read_json(paths.job) or {}
    job, scheduler = document.get("job"), batch_scheduler(str(document.get("backend")))
    if not isinstance(job, str) or scheduler is None:
        return None
    return QueuedJob(job, scheduler, paths)

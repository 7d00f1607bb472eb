"""Programs that stand for the commands of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tfcluster.plan.model import Description
from tfcluster.schedulers.base import BatchScheduler, CommandAnswer, LauncherCommand
from tfcluster.schedulers.script import job_script

FOLDER = Path("/home/a/.local/state/tfcluster/runs/digits-1")
LAUNCHER = LauncherCommand(
    folder=FOLDER,
    log=FOLDER / "launcher.log",
    python="/opt/venv/bin/python",
    root=None,
)


def program(folder: Path, name: str, text: str) -> Path:
    """An executable shell script in ``folder``."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}")
    file.chmod(0o755)
    return file


def saying(*answers: CommandAnswer) -> Callable[[tuple[str, ...]], CommandAnswer]:
    """An Ask that gives these answers in turn."""
    left = list(answers)
    return lambda argv: left.pop(0)


def env_of(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job whose commands are in ``folder``."""
    path = f"{folder}:/usr/local/bin:/usr/bin:/bin"
    state = str(folder / "state")
    return {"PATH": path, "HOSTNAME": "here", "TFCLUSTER_STATE_DIR": state, **more}


def directives(
    scheduler: BatchScheduler, description: Description, prefix: str
) -> list[str]:
    """The directives of the job script, without their prefix."""
    lines = job_script(scheduler, description, LAUNCHER).splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]

"""The command ``tensorboard``: find a run's event files and start TensorBoard."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tfcluster.base.errors import ConfigError, Problem, StartError
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.plan.model import Interpreter
from tfcluster.record.launched import launched
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import find, state_dir
from tfcluster.record.run_status import RunView

_EVENTS = "events.out.tfevents."
_SKIPPED = ("node_modules", "__pycache__")
_MOST_FOLDERS = 20_000
_LATE_S = 60.0
"""How long a file may still be written to after the run was recorded as over."""
_PARTS = ("train", "validation")
"""The folders that the Keras callback creates in its log folder."""
_HAS = "import importlib.util as u, sys; sys.exit(u.find_spec('tensorboard') is None)"


def tensorboard(
    run: str | None, environ: Mapping[str, str], *, logdir: str | None, port: int | None
) -> int:
    paths = find(state_dir(environ), run)
    description = launched(paths)
    folder = Path(logdir).absolute() if logdir else None
    if folder is None:
        view = read_run(paths, now_s=time.time())
        folder = log_folder(_written_by(view, description.workdir))
    if folder is None:
        problem = f"it has written no event files below {description.workdir} here"
        hint = (
            "use keras.callbacks.TensorBoard or tf.summary; copy files of other hosts "
            "here; --logdir names another folder"
        )
        raise ConfigError([Problem(paths.run, problem, hint)])
    put(f"{folder}\n")
    argv = _tensorboard(description.python, environ)
    if argv is None:
        interpreter = shlex.join(description.python)
        raise StartError(
            "TensorBoard is not installed",
            hint=f"{interpreter} -m pip install tensorboard; or elsewhere: "
            f"tensorboard --logdir {folder}",
        )
    argv += ["--logdir", str(folder)]
    if port is not None:
        argv += ["--port", str(port)]
    say(sanitise(f"starting {' '.join(argv)}"))
    os.chdir("/")  # python -m would import modules from the current folder
    os.execvpe(argv[0], argv, dict(environ))


def log_folder(folders: Iterable[Path]) -> Path | None:
    """The folder for TensorBoard, from those that have event files. Pure."""
    distinct = sorted(set(folders))
    if not distinct:
        return None
    if len(distinct) == 1:
        only = distinct[0]
        return only.parent if only.name in _PARTS else only
    return Path(os.path.commonpath(distinct))


def _written_by(view: RunView, workdir: Path) -> Iterator[Path]:
    """The folders with event files that were written during the run."""
    began_s = (view.started_s or 0.0) - 1
    ended_s = time.time() if view.ended_s is None else view.ended_s
    for count, (where, folders, names) in enumerate(os.walk(workdir)):
        if count > _MOST_FOLDERS:
            return
        folders[:] = [f for f in folders if f[0] != "." and f not in _SKIPPED]
        for name in names:
            if not name.startswith(_EVENTS):
                continue
            try:
                written_s = Path(where, name).stat().st_mtime
            except OSError:
                continue
            if began_s <= written_s <= ended_s + _LATE_S:
                yield Path(where)
                break


def _tensorboard(python: Interpreter, environ: Mapping[str, str]) -> list[str] | None:
    with contextlib.suppress(OSError):
        done = subprocess.run(
            [*python, "-c", _HAS],
            env=dict(environ),
            cwd="/",
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return [*python, "-m", "tensorboard.main"]
    program = shutil.which("tensorboard", path=environ.get("PATH"))
    return [program] if program else None

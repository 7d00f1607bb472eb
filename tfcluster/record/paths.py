"""The places of the records of runs, and which run a user means.

The only module that has the names of files and folders.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tfcluster.base.errors import ConfigError, Problem, ResourceError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.state_folder import state_path
from tfcluster.base.task_id import TaskId

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN_ID = re.compile(r"(?P<name>.+)-(?P<stamp>\d{8}-\d{6})-[0-9a-f]+")
ELSEWHERE = "set TFCLUSTER_STATE_DIR to your own folder on another file system"


class _File:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunPaths, kind: type[RunPaths]) -> Path:
        return run.root / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run; ``root`` is its folder, named by the run id."""

    root: Path

    plan = _File("plan.json")
    launched = _File("launch.json")
    """The Description with which the run was launched."""
    events = _File("events.jsonl")
    progress = _File("progress.json")
    metrics = _File("metrics.ndjson")
    report = _File("report.json")
    lock = _File("lock")
    launcher_log = _File("launcher.log")
    end_log = _File("on-end.log")
    """The output of the command ``on_end``."""
    job = _File("job.json")
    """The scheduler's job that the run was submitted as."""
    next = _File("next.json")
    """The run that a requeued job started after this one."""
    previous = _File("previous.json")
    """The run that this one continues."""
    requests = _File("requests")
    """The folder of requests to the launcher."""
    fetching = _File("fetching.json")
    """The progress of the results that are being fetched now."""
    resized = _File("resized.json")
    """The Description since the last resize."""
    logs = _File("logs")

    @property
    def run(self) -> str:
        return self.root.name

    @property
    def name(self) -> str:
        return _parts(self.run)[0]

    def log(self, task: TaskId) -> Path:
        return self.logs / task.log_name

    def trace(self, task: TaskId) -> Path:
        return self.root / "trace" / f"{task.log_name.removesuffix('.log')}.jsonl"

    def older_trace(self, task: TaskId) -> Path:
        return self.trace(task).with_suffix(".old.jsonl")


def state_dir(environ: Mapping[str, str]) -> Path:
    """The folder of all records, made private if needed. Raises ResourceError."""
    path = state_path(environ)
    try:
        _refuse_foreign_ways(path)  # before anything is created, and afterwards
        created = _make_folders(path)
        _refuse_foreign_ways(path)
        status = path.stat()
        if not created and _is_ours_and_empty(path, status):
            path.chmod(FOLDER_MODE)
            status = path.stat()
    except OSError as error:
        raise ResourceError(
            f"cannot use the state folder {path}: {error.strerror}", hint=ELSEWHERE
        ) from error
    refuse_open_folder(path, status, created=created)
    return path


def _is_ours_and_empty(path: Path, status: os.stat_result) -> bool:
    """Whether the user created the folder and it is empty: it may be made private."""
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return ours and bool(status.st_mode & 0o077) and not any(path.iterdir())


def names_dir(state: Path) -> Path:
    return _private_folder(state / "names")


def _make_folders(path: Path) -> bool:
    """Create missing folders, private at once; True if the last one is new."""
    created = False
    for folder in (*reversed(path.parents), path):
        created = not folder.exists()
        if created:
            folder.mkdir(FOLDER_MODE, exist_ok=True)
    return created


def _refuse_foreign_ways(path: Path) -> None:
    """Raise ResourceError if users other than root control where ``path`` leads."""
    for place in (path, *path.parents):
        if not (status := _status_of(place, follow_symlinks=False)):
            continue
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise ResourceError(
                f"{place} is a link that belongs to uid {status.st_uid}", hint=ELSEWHERE
            )
    for parent in {*path.parents, *path.resolve().parents}:
        if not (status := _status_of(parent)):
            continue
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ResourceError(
                f"other users can replace {path}: {parent} is writable by others "
                f"({stat.S_IMODE(status.st_mode):04o})",
                hint=f"chmod o-w {parent}, or {ELSEWHERE}",
            )


def _status_of(path: Path, *, follow_symlinks: bool = True) -> os.stat_result | None:
    try:
        return path.stat(follow_symlinks=follow_symlinks)
    except FileNotFoundError:
        return None


def refuse_open_folder(path: Path, status: os.stat_result, *, created: bool) -> None:
    """Raise ResourceError unless the folder is private. ``created``: we made it now."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise ResourceError(f"the state folder {path} is not a folder", hint=ELSEWHERE)
    if status.st_uid != os.geteuid():
        raise ResourceError(
            f"the state folder {path} belongs to uid {status.st_uid}, not to uid "
            f"{os.geteuid()}",
            hint=ELSEWHERE,
        )
    if mode & 0o077 and created:
        raise ResourceError(
            f"the file system of {path} ignores file modes: the new folder is "
            f"{mode:04o}, not 0700, so others could read it",
            hint=ELSEWHERE,
        )
    if mode & 0o077:
        raise ResourceError(
            f"the state folder {path} is open to others ({mode:04o})",
            hint=f"chmod 700 {path}, or {ELSEWHERE}",
        )


def _private_folder(path: Path) -> Path:
    path.mkdir(FOLDER_MODE, exist_ok=True)
    return path


def valid_name(name: str) -> bool:
    """Whether a run may have this name, which becomes part of paths."""
    return _NAME.fullmatch(name) is not None


def new_run_id(
    name: str, now_s: float, random: Callable[[int], bytes] = os.urandom
) -> str:
    """An id for a run that starts now in UTC: ``digits-20261120-101500-3f2a``."""
    if not valid_name(name):
        raise ValueError(f"{name!r} cannot be the name of a run")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    return f"{name}-{stamp}-{random(2).hex()}"


def create_run(
    state: Path, name: str, now_s: float, random: Callable[[int], bytes] = os.urandom
) -> RunPaths:
    """Create the folder of a new run. Raises ResourceError if that fails."""
    try:
        runs = _private_folder(state / "runs")
        while True:
            paths = RunPaths(runs / new_run_id(name, now_s, random))
            try:
                paths.root.mkdir(FOLDER_MODE)
            except FileExistsError:
                continue  # another launch in the same second has the same random digits
            try:
                paths.logs.mkdir(FOLDER_MODE)
            except OSError:
                paths.root.rmdir()  # it would look like a run that never ends
                raise
            return paths
    except OSError as error:
        raise ResourceError(
            f"cannot make a folder for the run in {state}: {error.strerror}",
            hint=ELSEWHERE,
        ) from error


def runs(state: Path) -> list[RunPaths]:
    try:
        ids = [name for name in os.listdir(state / "runs") if _RUN_ID.fullmatch(name)]  # noqa: PTH208 - names suffice
    except FileNotFoundError:
        return []
    records = [RunPaths(state / "runs" / run) for run in ids]
    crowd = Counter(_parts(run)[1] for run in ids)
    return sorted(records, key=lambda paths: _age_key(paths, crowd), reverse=True)


def find(state: Path, text: str | None) -> RunPaths:
    """A run by its id, a unique prefix or name (the newest). Raises ConfigError."""
    records = runs(state)
    if not records:
        raise _usage(str(state), "no runs yet", "`tfcluster launch` starts one")
    if text is None:
        return records[0]
    for matches in (
        [paths for paths in records if paths.run == text],
        [paths for paths in records if paths.name == text][:1],
        [paths for paths in records if paths.run.startswith(text)] if text else [],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            shown = _listed([paths.run for paths in matches])
            raise _usage(text, f"{len(matches)} runs begin with this", shown)
    raise _usage(text, "no such run", _suggestion(text, records))


def _parts(run: str) -> tuple[str, str]:
    match = _RUN_ID.fullmatch(run)
    return (match["name"], match["stamp"]) if match else (run, "")


def _age_key(paths: RunPaths, crowd: Mapping[str, int]) -> tuple[str, int, str]:
    """Sort key: the time in the id; files are read only for runs of the same second."""
    stamp = _parts(paths.run)[1]
    written_ns = 0
    if crowd[stamp] > 1:
        for file in (paths.plan, paths.logs):
            try:
                written_ns = file.stat().st_mtime_ns
                break
            except OSError:
                continue
    return stamp, written_ns, paths.run


def _suggestion(text: str, records: list[RunPaths]) -> str:
    import difflib  # takes 15 ms, needed only for this message

    ids = [paths.run for paths in records]
    words = dict.fromkeys([*(paths.name for paths in records), *ids])
    close = difflib.get_close_matches(text, words, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}newest: {_listed(ids)}"


def _listed(words: list[str], limit: int = 5) -> str:
    more = f", and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def _usage(where: str, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(where, message, hint)])

"""The command ``clean``: remove old runs' records, crash files and environments."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfcluster.agent.environments import environments as environments_of
from tfcluster.agent.environments import remove as remove_environment
from tfcluster.base.durations import parse_duration
from tfcluster.base.errors import ConfigError, ExitCode, Problem, TfclusterError
from tfcluster.commands.record_query import one_run
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.text import byte_size, duration, plural
from tfcluster.record.liveness import heartbeat_s
from tfcluster.record.paths import RunPaths, runs, state_dir
from tfcluster.record.run_locks import (
    old_crash_files,
    remove_rests,
    remove_run,
    size_of,
)


@dataclass(slots=True)
class _Total:
    runs: int = 0
    crash_files: int = 0
    environments: int = 0
    bytes: int = 0
    failed: bool = False


def clean(
    older_than: str,
    environ: Mapping[str, str],
    *,
    environments: bool = False,
    dry_run: bool,
) -> int:
    """Remove what ended longer than ``older_than`` ago. Raises ConfigError."""
    age_s = parse_duration(older_than)
    if age_s is None:
        hint = "write a number with a unit: 12h, 7d, 0s"
        problem = Problem("--older-than", f"{older_than!r} is not a duration", hint)
        raise ConfigError([problem])
    state, now_s = state_dir(environ), time.time()
    total = _Total()
    if not dry_run:
        with _reported(total):
            remove_rests(state)
    for paths in reversed(runs(state)):
        seen_s = heartbeat_s(paths)
        # With 0s, all runs are read: a heartbeat may be newer than this command.
        if age_s and seen_s is not None and now_s - seen_s < age_s:
            continue  # written to since then; no need to read it
        with _reported(total):
            _clean_run(paths, seen_s or 0.0, age_s, environ, total, dry_run=dry_run)
    for path in old_crash_files(state, now_s - age_s):
        with _reported(total):
            size = path.lstat().st_size
            if not dry_run:
                path.unlink()
            total.crash_files += 1
            total.bytes += size
            put(sanitise(f"{path.name}  ({byte_size(size)})") + "\n")
    if environments:
        _clean_environments(now_s, age_s, environ, total, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    counts = [plural(total.runs, "run"), plural(total.crash_files, "crash file")]
    if environments:
        counts.append(plural(total.environments, "environment"))
    *most, last = counts
    say(f"{verb} {', '.join(most)} and {last}, {byte_size(total.bytes)}")
    return ExitCode.RESOURCES if total.failed else ExitCode.OK


def _clean_run(
    paths: RunPaths,
    seen_s: float,
    age_s: float,
    environ: Mapping[str, str],
    total: _Total,
    *,
    dry_run: bool,
) -> None:
    view = one_run(paths.run, environ)
    now_s = time.time()
    ended_s = seen_s if view.ended_s is None else view.ended_s
    kept = _why_kept(paths, environ) if view.state.final else f"it is {view.state}"
    if view.unknown_since_s is not None:
        kept = view.reason or "its state is unknown"
    if kept is None and now_s - ended_s < age_s:
        return
    size = size_of(paths.root)
    if kept is None and not dry_run and not remove_run(paths):
        kept = "it is running"
    if kept is not None:
        say(sanitise(f"kept {paths.run}: {kept}"))
        return
    total.runs += 1
    total.bytes += size
    ago = duration(now_s - ended_s)
    put(
        sanitise(f"{paths.run}  ({view.state}, ended {ago} ago, {byte_size(size)})")
        + "\n"
    )


def _clean_environments(
    now_s: float,
    age_s: float,
    environ: Mapping[str, str],
    total: _Total,
    *,
    dry_run: bool,
) -> None:
    for environment in environments_of(environ):
        home, unused_s = environment.home, now_s - environment.used_s
        if unused_s < age_s:
            continue
        with _reported(total):
            size = size_of(Path(home))
            if not dry_run and not remove_environment(home):
                say(sanitise(f"kept {home}: it is in use"))
                continue
            total.environments += 1
            total.bytes += size
            ago = duration(max(0.0, unused_s))
            put(sanitise(f"{home}  (used {ago} ago, {byte_size(size)})") + "\n")


def _why_kept(paths: RunPaths, environ: Mapping[str, str]) -> str | None:
    """Why a run that is over must be kept: its job may start again; or None."""
    if not paths.job.exists():
        return None
    # This import includes the launcher, which takes long.
    from tfcluster.submit.job_status import may_start_again

    return may_start_again(paths, environ)


@contextlib.contextmanager
def _reported(total: _Total) -> Iterator[None]:
    try:
        yield
    except TfclusterError as error:
        say(sanitise(f"error: {error.message}"))
        total.failed = True
    except OSError as error:
        say(sanitise(f"error: cannot remove {error.filename}: {error.strerror}"))
        total.failed = True

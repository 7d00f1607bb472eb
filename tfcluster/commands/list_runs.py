"""The command ``list``: one line for each run."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfcluster.console.display import style_of
from tfcluster.console.output import put, say
from tfcluster.console.views.status import run_list
from tfcluster.record.load_run import read_summary
from tfcluster.record.paths import RunPaths, runs, state_dir
from tfcluster.record.run_status import RunView, iso_time
from tfcluster.vocabulary import FORMAT_VERSION

if TYPE_CHECKING:
    from tfcluster.documents import run as documents


def list_runs(environ: Mapping[str, str], *, limit: int | None, as_json: bool) -> int:
    """Print the ``limit`` newest runs, newest first; all runs if it is None."""
    known, now_s = runs(state_dir(environ)), time.time()
    shown = list(itertools.islice(known, limit))
    views = [read_summary(paths, now_s=now_s) for paths in shown]
    if as_json:
        rows = [_row(*pair) for pair in zip(shown, views, strict=True)]
        found: documents.RunList = {"schema": FORMAT_VERSION, "runs": rows}
        put(json.dumps(found, indent=1) + "\n")
        return 0
    lines = run_list(views, now_s, style_of(sys.stdout, environ))
    put("".join(f"{line}\n" for line in lines))
    if not known:
        say("no runs yet: `tfcluster launch` starts one")
    elif len(known) > len(shown):
        more = len(known) - len(shown)
        say(f"and {more:,} older; --limit {len(known)} shows all")
    return 0


def _row(paths: RunPaths, view: RunView) -> documents.ListedRun:
    return {
        "run": view.run,
        "name": view.name,
        "backend": view.backend,
        "state": view.state.value,
        "exit_code": view.exit_code,
        "started": iso_time(view.started_s),
        "ended": iso_time(view.ended_s),
        "reason": view.reason,
        "folder": str(paths.root),
    }

"""Records of runs of all kinds, with hostile text in every place that takes text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tfcluster.record.paths import RunPaths

T = 1795169700.0  # 2026-11-20 10:15:00 UTC
BAD = '<script>alert(1)</script>$x^{$ \x1b[31m\u202e\x00&amp;" onload="x'
RUN = {"type": "run", "name": "digits", "backend": "local", "version": "0.2.0"}


def write(
    state: Path,
    name: str,
    events: list[dict[str, Any]],
    metrics: list[dict[str, Any]],
    tasks: list[str],
    **settings: Any,
) -> RunPaths:
    """A record with these events, metrics and tasks."""
    state.mkdir(0o700, exist_ok=True)
    paths = RunPaths(state / "runs" / f"{name}-20261120-101500-3f2a")
    paths.logs.mkdir(parents=True)
    planned = [{"task": task, "host": "node1"} for task in tasks]
    plan = {"name": name, "hosts": [{"host": "node1"}], "tasks": planned}
    if events:
        paths.plan.write_text(json.dumps(plan))
    for path, lines in ((paths.events, events), (paths.metrics, metrics)):
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if settings:
        paths.launched.write_text(json.dumps({"description": settings}))
    return paths


def failed(
    state: Path, *, text: str = BAD, tasks: int = 2, steps: int = 60
) -> RunPaths:
    """A run that trained, was restarted, and failed; ``text`` is everywhere."""
    names = [f"worker:{number}" for number in range(tasks)]
    events: list[dict[str, Any]] = [
        {"t": T, **RUN, "argv": ["python", text], "started": T},
        {"t": T, "type": "host", "host": "node1", "state": "ready", "cause": text},
        {"t": T, "type": "machine", "host": "node1", "python": text, "cpus": 8},
        {"t": T, "type": "versions", "task": "worker:0", "versions": {text: text}},
        {"t": T, "type": "note", "text": text},
    ]
    for attempt in (0, 1):
        for number, name in enumerate(names):
            at = T + 100 * attempt + number
            key = {"type": "task", "task": name, "attempt": attempt, "host": text}
            events += [
                {"t": at, **key, "state": "starting"},
                {"t": at + 5, **key, "state": "running", "pid": 5},
                {"t": at + 90, **key, "state": "failed", "exit_code": 1, "cause": text},
            ]
    failure = {
        "type": "failure",
        "task": "worker:0",
        "host": text,
        "exit_code": 1,
        "cause": text,
        "log_tail": [text, "</pre><img src=x>"],
        "log": f"/{text}",
    }
    events += [
        {"t": T + 200, **failure},
        {"t": T + 201, **failure, "task": "worker:1", "secondary": True},
        {"t": T + 202, "type": "state", "state": "failed", "reason": text},
        {"t": T + 203, "type": "end", "state": "failed", "exit_code": 1},
    ]
    metrics: list[dict[str, Any]] = []
    for step in range(1, steps):
        for rank, name in enumerate(names):
            metrics.append(
                {
                    "t": T + step + 5,
                    "type": "sample",
                    "task": name,
                    "attempt": step // 40,
                    "step": step,
                    "steps_per_s": 40.0 + rank + math.sin(step),
                    "wait_share": 0.3 if rank else 0.05,
                    "bytes": step * 10**6,
                    "epoch": 1 + step // 20,
                    "metrics": {"loss": 2.0 / step, text: None if step % 7 else 0.5},
                    "rss_bytes": 10**8 * (4 + rank),
                    "cpu_s": 1.5 * step,
                    "gpus": [{"gpu": 0, "busy": 0.8, "memory_bytes": 10**10}],
                }
            )
        if step % 20 == 0:
            said = {"loss": 2.0 / step, "val_loss": 2.5 / step, f"val_{text}": 0.5}
            epoch = {"type": "epoch", "task": "worker:0", "step": step}
            metrics.append({"t": T, **epoch, "epoch": step // 20, "metrics": said})
    total = {"what": text, "count": 60, "seconds": 12.5, "bytes": 10**9}
    exchanges = {"t": T, "type": "exchanges", "task": "worker:0", "totals": [total]}
    metrics.append(exchanges)
    env = {"TOKEN": "not to be shown"}
    return write(
        state, "digits", events, metrics, names, command=[text], env=env, hosts=[]
    )


def plain(state: Path) -> RunPaths:
    """A run of a command that does not train."""
    key = {"type": "task", "task": "worker:0", "attempt": 0}
    events = [
        {"t": T, **RUN, "argv": ["sleep", "3"]},
        {"t": T + 0.5, **key, "state": "starting"},
        {"t": T + 1, **key, "state": "running"},
        {"t": T + 4, **key, "state": "succeeded", "exit_code": 0, "seconds": 3.0},
        {"t": T + 5, "type": "end", "state": "succeeded", "exit_code": 0},
    ]
    used = {"type": "sample", "task": "worker:0", "rss_bytes": 10**7, "cpu_s": 0.5}
    return write(state, "plain", events, [{"t": T + 2, **used}], ["worker:0"])


def lost(state: Path) -> RunPaths:
    """A run whose launcher was killed while its tasks ran."""
    launcher = {"pid": 2**22 + 1, "start_time": 1, "boot_id": "gone", "host": "nowhere"}
    events = [
        {"t": T, **RUN, "argv": ["python"], **launcher},
        {"t": T + 1, "type": "state", "state": "running"},
        {"t": T + 1, "type": "task", "task": "worker:0", "state": "starting"},
        {"t": T + 2, "type": "task", "task": "worker:0", "state": "running"},
    ]
    return write(state, "lost", events, [], ["worker:0"])


def empty(state: Path) -> RunPaths:
    """The folder of a run of which nothing is known."""
    return write(state, "empty", [], [], [])

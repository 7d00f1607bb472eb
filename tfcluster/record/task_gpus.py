"""Which tasks of a run had GPUs, according to its plan."""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.record.files import read_json
from tfcluster.record.paths import RunPaths


def gpus_of_tasks(paths: RunPaths) -> Callable[[str], bool | None]:
    """Whether a task had GPUs, by its name; None: unknown."""
    plan = read_json(paths.plan) or {}
    counts = {host["host"]: host.get("gpus") for host in plan.get("hosts", ())}
    tasks = {entry["task"]: entry for entry in plan.get("tasks", ())}

    def has_gpus(task: str) -> bool | None:
        entry = tasks.get(task, {})
        if entry.get("env", {}).get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return False
        count = counts.get(entry.get("host"))
        return None if count is None else count > 0

    return has_gpus

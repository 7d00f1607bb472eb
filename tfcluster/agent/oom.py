"""Says whether the kernel's OOM killer struck, from counters of the control group.

Knows no tasks. It is asked when something other than the agent killed a process.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfcluster.agent.proc import text_of

_CGROUPS = "/sys/fs/cgroup"


def parse_count(text: str) -> int | None:
    """N of the line ``oom_kill N``, as in memory.events and /proc/vmstat, or None."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return None


def counter_files(cgroup: str, root: str = _CGROUPS) -> Iterator[str]:
    """Files with the counter, narrowest group first; ``cgroup``: /proc/PID/cgroup."""
    entries = [line.split(":", 2) for line in cgroup.splitlines()]
    for _, controllers, path in entries:
        if controllers == "":
            for base in (root, f"{root}/unified"):
                yield f"{base}/{_within(path)}memory.events"
        elif "memory" in controllers.split(","):
            yield f"{root}/memory/{_within(path)}memory.oom_control"
            # In a container, the path is the one on the host, but the mount shows only
            # the container's own groups.
            yield f"{root}/memory/memory.oom_control"
    yield f"{root}/memory.events"
    yield "/proc/vmstat"


def _within(path: str) -> str:
    inner = path.strip("/")
    return f"{inner}/" if inner else ""


class OomCounter:
    """Counts processes killed by the OOM killer in this process's control group."""

    def __init__(self) -> None:
        try:
            cgroup = text_of("/proc/self/cgroup")
        except OSError:
            cgroup = ""
        self._file = next((f for f in counter_files(cgroup) if _count(f) >= 0), None)
        self._seen = self._now()

    def _now(self) -> int:
        return _count(self._file) if self._file is not None else 0

    def struck(self) -> bool:
        """Whether it has struck again; each strike is returned once."""
        if self._now() <= self._seen:
            return False
        self._seen += 1
        return True


def _count(path: str) -> int:
    try:
        count = parse_count(text_of(path))
    except OSError:
        return -1
    return -1 if count is None else count

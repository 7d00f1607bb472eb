"""Compares what two processes inherited when they were forked and cannot change.

A task that is forked from a kept interpreter must run as if the agent had started it:
with the same rights, in the same namespaces, under the same limits.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

from tfcluster.agent import proc
from tfcluster.agent.light_dataclasses import dataclass

_LATER = ("pid_for_children", "time_for_children")
_RIGHTS = (
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
)
_LIMITS = tuple(
    value for name, value in vars(resource).items() if name.startswith("RLIMIT_")
)
_READ_AT_START = {resource.RLIMIT_STACK}
"""glibc reads this limit when a program starts: new threads get stacks of this size."""
_LINE_BYTES = 200
_SHELLS = ("/user.slice/user-",)
"""systemd puts each login into its own control group below the user's group."""


@dataclass(frozen=True, slots=True)
class ProcessAttributes:
    """The attributes of one process."""

    namespaces: Mapping[str, str]
    rights: Mapping[str, str]
    root: str
    label: str
    groups: tuple[str, ...]
    limits: Mapping[int, tuple[int, int]]
    nice: int
    oom_score_adj: int
    policy: int
    cpus: frozenset[int]
    """Libraries start as many threads as there are CPUs when they are imported."""
    memory: str
    """The NUMA policy for memory."""
    personality: str


def attributes_of(pid: int) -> ProcessAttributes:
    """The attributes of a process of ours. Raises OSError if it may not be examined."""
    folder = f"{proc.PROC}/{pid}"
    names = sorted(set(os.listdir(f"{folder}/ns")) - set(_LATER))
    status = dict(
        line.split(":", 1) for line in proc.text_of(f"{folder}/status").splitlines()
    )
    return ProcessAttributes(
        namespaces={name: os.readlink(f"{folder}/ns/{name}") for name in names},
        rights={
            name: " ".join(sorted(status.get(name, "").split())) for name in _RIGHTS
        },
        root=os.readlink(f"{folder}/root"),
        label=_optional(f"{folder}/attr/current"),
        groups=tuple(sorted(proc.text_of(f"{folder}/cgroup").splitlines())),
        limits={number: resource.prlimit(pid, number) for number in _LIMITS},
        nice=os.getpriority(os.PRIO_PROCESS, pid),
        oom_score_adj=int(proc.text_of(f"{folder}/oom_score_adj")),
        policy=os.sched_getscheduler(pid),
        cpus=frozenset(os.sched_getaffinity(pid)),
        memory=_memory_policy(f"{folder}/numa_maps"),
        personality=_optional(f"{folder}/personality"),
    )


def _optional(path: str) -> str:
    """The content of a file that some kernels do not have, or do not let us read."""
    try:
        return proc.text_of(path).strip("\0\n")
    except OSError:
        return ""


def _memory_policy(path: str) -> str:
    """The NUMA policy of the first mapping, an ordinary one (numa(7)): ``default``."""
    try:
        # Read only the start: the kernel counts all pages of each mapping that is read.
        with open(path, "rb", buffering=0) as maps:
            words = maps.read(_LINE_BYTES).split(maxsplit=2)
    except OSError:
        return ""
    return words[1].decode() if words[1:] else ""


def obstacle(here: ProcessAttributes, there: ProcessAttributes) -> str | None:
    """Why a fork of ``there`` cannot be like a process that is started ``here``."""
    for name in here.namespaces.keys() | there.namespaces.keys():
        if here.namespaces.get(name) != there.namespaces.get(name):
            return f"it is in another {name} namespace"
    if here.root != there.root:
        return "it has another root folder"
    for name, value in here.rights.items():
        if there.rights[name] != value:
            return f"it has other rights ({name})"
    if here.label != there.label:
        return f"it has the security label {there.label!r}, not {here.label!r}"
    if not _same_groups(here.groups, there.groups):
        return "it is in another control group"
    for number, (soft, hard) in here.limits.items():
        if _amount(there.limits[number][1]) < _amount(hard):
            return f"one of its resource limits (number {number}) is lower"
        if number in _READ_AT_START and there.limits[number][0] != soft:
            return "it was started with another limit of the stack's size"
    if there.nice > here.nice:
        return f"its nice value is {there.nice}, not {here.nice}"
    if there.oom_score_adj > here.oom_score_adj:
        return f"its oom_score_adj is {there.oom_score_adj}, not {here.oom_score_adj}"
    if there.policy != here.policy:
        return "it has another scheduling policy"
    if there.cpus != here.cpus:
        counts = f"{len(there.cpus)}, not {len(here.cpus)}"
        return f"it may use other CPUs than this run ({counts})"
    if there.memory != here.memory:
        return "it has another NUMA policy"
    if there.personality != here.personality:
        return "it has another execution domain (personality)"
    return None


def _amount(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _same_groups(here: tuple[str, ...], there: tuple[str, ...]) -> bool:
    return {_login(line) for line in here} == {_login(line) for line in there}


def _login(line: str) -> str:
    """A line of /proc/PID/cgroup, without the part that differs between logins."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    for start in _SHELLS:
        if path.startswith(start):
            path = "/".join(path.split("/")[:3])
    return f"{number}:{controllers}:{path}"

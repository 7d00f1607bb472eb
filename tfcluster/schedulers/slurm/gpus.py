"""Finds the job's GPUs on each host with one step that runs on all hosts. Pure.

Device names are valid only on the host itself: SLURM_JOB_GPUS has the names on the
batch host, and inside a cgroup names start at 0 again, or may be UUIDs or parts of a
GPU. The names are used as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# A constant: no user input goes into this shell command.
_ASK = 'echo "tfcluster-gpus $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES-unset}"'
_MARK = "tfcluster-gpus"
_COUNTS = (
    "SLURM_GPUS",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
)
_NAMES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def has_gpus(environ: Mapping[str, str]) -> bool:
    """Whether any variable says that the job has GPUs."""
    counted = any(environ.get(name, "0") not in ("", "0") for name in _COUNTS)
    return counted or any(environ.get(name) for name in _NAMES)


def question_argv(
    hosts: Sequence[str], *, group: int | None = None, count: int | None = None
) -> tuple[str, ...]:
    """The argv that asks ``hosts``, nodes of a job, or of a component of the job.

    ``count`` is as in ``Node.gpus``.
    """
    component = () if group is None else (f"--het-group={group}",)
    return (
        "srun",
        *component,
        "--overlap",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        "--ntasks-per-node=1",
        *(() if count is None else (f"--gpus-per-node={count}",)),
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
        "--export=ALL",
        "--immediate=60",
        "--chdir=/",
        "--job-name=tfcluster",
        "--quiet",
        "/bin/sh",
        "-c",
        _ASK,
    )


def parse(said: str) -> dict[str, tuple[str, ...] | None]:
    """Node -> device names, for nodes that answered.

    None: Slurm does not bind GPUs there; (): the node has no GPU for us.
    """
    found: dict[str, tuple[str, ...] | None] = {}
    for line in said.splitlines():
        words = line.split(" ", 2)
        if words[0] != _MARK or len(words) < 2:
            continue
        devices = words[2].strip() if len(words) > 2 else ""
        if devices == "unset":
            found[words[1]] = None
        elif devices in ("", "NoDevFiles", "-1"):
            found[words[1]] = ()
        else:
            found[words[1]] = tuple(d.strip() for d in devices.split(",") if d.strip())
    return found

"""Which GPUs Slurm gave the job on each host: asked there, in one step for all. Pure.

Only on the host itself do the names hold: SLURM_JOB_GPUS has the batch host's, and
within a cgroup they begin at 0 again, may be UUIDs, or parts of a GPU. Nothing is
renumbered.
"""

from __future__ import annotations

from collections.abc import Mapping

# Text is constant: nothing of a description or of the environment goes into it.
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
    """Whether anything says that the job has GPUs at all."""
    counted = any(environ.get(name, "0") not in ("", "0") for name in _COUNTS)
    return counted or any(environ.get(name) for name in _NAMES)


def question_argv(count: int, *, group: int | None = None) -> tuple[str, ...]:
    """Asks the ``count`` nodes of a job, or of one of its components."""
    component = () if group is None else (f"--het-group={group}",)
    return (
        "srun",
        *component,
        "--overlap",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
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
    """Device names for each node that answered; None: Slurm binds no GPUs there.

    Empty is an answer too: no GPU.
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

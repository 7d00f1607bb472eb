"""The section ``slurm:`` of cluster.yaml, and what ``tfcluster init`` prints for it."""

from __future__ import annotations

from dataclasses import dataclass

from tfcluster.schedulers.base import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """What is requested from Slurm. The number of tasks follows from `tasks`."""

    nodes: int | None = setting("count", "sbatch --nodes.")
    tasks_per_node: int | None = setting(
        "count", "At most this many tasks on each node."
    )
    cpus_per_task: int | None = setting("count", "sbatch --cpus-per-task.")
    mem: str | None = setting("memory", "sbatch --mem: memory of each node, as 16G.")
    gpus_per_node: int | None = setting(
        "gpus", "sbatch --gpus-per-node. Default: what `gpus` of the tasks needs."
    )
    partition: str | None = setting("words", "sbatch --partition.")
    account: str | None = setting("word", "sbatch --account.")
    qos: str | None = setting("word", "sbatch --qos.")
    constraint: str | None = setting("line", "sbatch --constraint: features of nodes.")
    time: str | None = setting("time", "sbatch --time: as 4h, or in Slurm's format.")
    options: tuple[str, ...] = setting(
        "options", "More options of sbatch, one per item.", ()
    )


SYNONYMS = {
    "queue": "partition",
    **dict.fromkeys(
        ("walltime", "time_limit", "timelimit", "timeout", "timeout_min"), "time"
    ),
    **dict.fromkeys(("memory", "mem_gb", "job_mem", "mem_per_node"), "mem"),
    **dict.fromkeys(("cores", "cpus", "cpu", "ncpus", "job_cpu"), "cpus_per_task"),
    "ntasks_per_node": "tasks_per_node",
    "processes_per_node": "tasks_per_node",
    "project": "account",
    "feature": "constraint",
    "features": "constraint",
    "additional_parameters": "options",
}
ADVICE = {
    "setup": "setup: [module load cuda], at the top level",
    "job_script_prologue": "setup: [module load cuda], at the top level",
}
EXAMPLE = """\
backend: slurm                   # `tfcluster launch` submits a job, or uses its own
slurm:
  nodes: 2                       # the tasks below are divided among them
  time: 1h
  # mem: 16G                     # of each node
  # cpus_per_task: 8
  # partition: gpu
  # account: x
  # options: ["--exclusive"]     # any other options of sbatch

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 8, gpus: 1}  # the job asks for these GPUs
  # ps: 1                        # parameter servers, built in
"""

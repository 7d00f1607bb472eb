"""Words of other software for what cluster.yaml says in another way.

One table serves unknown keys, and words that stand where a mapping belongs.
"""

from __future__ import annotations

from collections.abc import Mapping

_SLURM = {
    "queue": "partition",
    "walltime": "time",
    "time_limit": "time",
    "timelimit": "time",
    "timeout": "time",
    "timeout_min": "time",
    "memory": "mem",
    "mem_gb": "mem",
    "job_mem": "mem",
    "mem_per_node": "mem",
    "cores": "cpus_per_task",
    "cpus": "cpus_per_task",
    "cpu": "cpus_per_task",
    "ncpus": "cpus_per_task",
    "job_cpu": "cpus_per_task",
    "ntasks_per_node": "tasks_per_node",
    "processes_per_node": "tasks_per_node",
    "project": "account",
    "feature": "constraint",
    "features": "constraint",
    "additional_parameters": "options",
    "job_extra": "options",
    "job_extra_directives": "options",
    "extra": "options",
}
_SGE = {
    "pe": "parallel_environment",
    "parallel_env": "parallel_environment",
    "nslots": "slots",
    "ntasks": "slots",
    "cores": "slots",
    "processes": "slots",
    "q": "queue",
    "partition": "queue",
    "l": "resources",
    "resource_spec": "resources",
    "resource": "resources",
    "job_extra": "options",
    "job_extra_directives": "options",
    "extra": "options",
}
_TOP = {
    "run": "command",
    "cmd": "command",
    "script": "command",
    "entrypoint": "command",
    "environment": "env",
    "cluster": "tasks",
    "cwd": "workdir",
    "working_dir": "workdir",
}
SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "": _TOP,
    "tasks": {
        "master": "chief",
        "parameter_server": "ps",
        "workers": "worker",
        "replicas": "worker",
    },
    "slurm": _SLURM,
    "sge": _SGE,
}
"""Section ("": the top level) -> another word for a key -> the key."""

SCHEDULERS = ("slurm", "sge")
"""Sections whose keys other software writes with the section's name before them."""

_GPUS = "tasks: {worker: {count: 2, gpus: 1}}"
_TASKS = "tasks: {worker: 4}"
_H_RT = 'resources: {h_rt: "4:00:00"}'
_H_VMEM = "resources: {h_vmem: 16G}"
_OF_GPUS = dict.fromkeys(
    ("gpus", "gpu", "num_gpus", "ngpus", "n_gpus", "gres", "gpus_per_task"), _GPUS
)
_OF_TASKS = dict.fromkeys(
    ("ntasks", "n", "np", "nprocs", "num_workers", "n_workers", "processes"), _TASKS
)
EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "": {**_OF_GPUS, **_OF_TASKS, "workers": _TASKS},
    "tasks": _OF_GPUS,
    "slurm": {
        **_OF_GPUS,
        **_OF_TASKS,
        "setup": "setup: [module load cuda], at the top level",
        "job_script_prologue": "setup: [module load cuda], at the top level",
        "env_extra": "env: {NAME: value}, at the top level",
    },
    "sge": {
        **_OF_GPUS,
        **dict.fromkeys(("time", "walltime", "h_rt", "timeout", "runtime"), _H_RT),
        **dict.fromkeys(("mem", "memory", "h_vmem", "mem_free"), _H_VMEM),
        **dict.fromkeys(("project", "P"), 'options: ["-P", "x"]'),
        "account": 'options: ["-A", "x"]',
        "env_extra": "env: {NAME: value}, at the top level",
    },
}
"""Section -> a word for which there is no single key -> what to write."""

"""Words of other software for what cluster.yaml says in another way.

One table serves unknown keys, and words that stand where a mapping belongs. Schedulers
add the words for keys of their sections.
"""

from __future__ import annotations

from collections.abc import Mapping

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "": {
        "run": "command",
        "cmd": "command",
        "script": "command",
        "entrypoint": "command",
        "environment": "env",
        "cluster": "tasks",
        "cwd": "workdir",
        "working_dir": "workdir",
    },
    "tasks": {
        "master": "chief",
        "parameter_server": "ps",
        "workers": "worker",
        "replicas": "worker",
    },
}
"""Section ("": the top level) -> another word for a key -> the key."""

OF_SECTIONS = dict.fromkeys(("job_extra", "job_extra_directives", "extra"), "options")
"""Other words for keys that the sections of all schedulers have."""

_GPUS = "tasks: {worker: {count: 2, gpus: 1}}"
_TASKS = "tasks: {worker: 4}"
_OF_GPUS = dict.fromkeys(
    ("gpus", "gpu", "num_gpus", "ngpus", "n_gpus", "gres", "gpus_per_task"), _GPUS
)
_OF_TASKS = dict.fromkeys(
    ("ntasks", "n", "np", "nprocs", "num_workers", "n_workers", "processes"), _TASKS
)
EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "": {**_OF_GPUS, **_OF_TASKS, "workers": _TASKS},
    "tasks": _OF_GPUS,
}
"""Section -> a word for which there is no single key -> what to write."""

EXAMPLES_OF_SECTIONS = {
    **_OF_GPUS,
    **_OF_TASKS,
    "env_extra": "env: {NAME: value}, at the top level",
}
"""The same for the sections of all schedulers."""

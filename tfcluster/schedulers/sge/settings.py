"""The section ``sge:`` of cluster.yaml, and what ``tfcluster init`` prints for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfcluster.schedulers.base import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SgeSettings:
    """What is requested from Grid Engine."""

    parallel_environment: str | None = setting("word", "qsub -pe: its name.")
    slots: int | None = setting("count", "qsub -pe: how many.")
    queue: str | None = setting("words", "qsub -q.")
    resources: Mapping[str, str] = setting("resources", "qsub -l, name and value.", {})
    options: tuple[str, ...] = setting(
        "options", "More options of qsub, one word per item.", ()
    )


SYNONYMS = {
    "pe": "parallel_environment",
    "parallel_env": "parallel_environment",
    **dict.fromkeys(("nslots", "ntasks", "cores", "processes"), "slots"),
    "q": "queue",
    "partition": "queue",
    **dict.fromkeys(("l", "resource_spec", "resource"), "resources"),
}
_H_RT = 'resources: {h_rt: "4:00:00"}'
_H_VMEM = "resources: {h_vmem: 16G}"
ADVICE = {
    **dict.fromkeys(("time", "walltime", "h_rt", "timeout", "runtime"), _H_RT),
    **dict.fromkeys(("mem", "memory", "h_vmem", "mem_free"), _H_VMEM),
    **dict.fromkeys(("project", "P"), 'options: ["-P", "x"]'),
    "account": 'options: ["-A", "x"]',
}
EXAMPLE = """\
backend: sge                     # `tfcluster launch` submits a job, or uses its own
sge:
  parallel_environment: mpi      # one of `qconf -spl`
  resources: {h_rt: "1:00:00"}   # quoted: YAML reads 1:00:00 as 3600
  # queue: all.q
  # options: ["-P", "x"]

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # ps: 1                        # parameter servers, built in
"""

"""Slurm: the hosts of the job that we are in; srun steps start the agents."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tfcluster.base.errors import ExitCode, StartError
from tfcluster.plan.model import Allocation, Description, Host
from tfcluster.schedulers.base import (
    BatchScheduler,
    Requeuing,
    asker,
    gpus_of_all,
    placeholders,
)
from tfcluster.schedulers.slurm import controller
from tfcluster.schedulers.slurm.request import (
    ADVICE,
    EXAMPLE,
    OPTIONS,
    SYNONYMS,
    SlurmSettings,
    contradictions,
    directives,
    job_size,
)
from tfcluster.schedulers.slurm.srun import (
    gpu_question_argv,
    has_gpus,
    meaning,
    own_words,
    parse_gpus,
    step_environ,
)
from tfcluster.schedulers.slurm.starter import SrunStarter
from tfcluster.schedulers.slurm.variables import (
    SlurmNode,
    is_inside,
    nodes,
    require_one_launcher,
)
from tfcluster.schedulers.starting import Starter

_ASK_S = 90.0


class SlurmScheduler(BatchScheduler, Requeuing):
    """Hosts and slots from the job's and step's variables, GPUs from the nodes."""

    name = "slurm"
    title = "Slurm"
    settings = SlurmSettings
    mistakes = staticmethod(contradictions)
    directives = staticmethod(directives)
    state = staticmethod(controller.state)
    is_inside = staticmethod(is_inside)
    options = OPTIONS
    launcher = "srun"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    option_hint = 'other options of sbatch: options: ["--{}=..."]'
    submit_command = "sbatch"
    job_id = controller.JOB_ID
    prefix = controller.COMMAND
    hints = controller.HINTS
    without_gpus = (
        "the job has none: ask for them with --gpus-per-node of sbatch or salloc"
    )

    def more_slots(self, tasks: int, hosts: int) -> str:
        return (
            f"ask for them: --ntasks={tasks} of sbatch or salloc, or `slurm: "
            f"{{tasks_per_node: {-(-tasks // hosts)}}}`"
        )

    def expected(self, description: Description) -> Allocation:
        size = job_size(description, self.settings_in(description))
        gpus = size["--gpus-per-node"] or gpus_of_all(description)
        hosts = placeholders(size["--nodes"] or 1, size["--ntasks-per-node"], gpus)
        return self.granted(description, hosts)

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        return ("sbatch", "--parsable", str(script))

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # The launcher replaces the batch shell (exec), so the signal reaches it.
        return (
            ("scancel", "--quiet", "--state=PENDING", job),
            ("scancel", "--quiet", "--batch", "--signal=INT", job),
        )

    def kill_argv(self, job: str) -> tuple[str, ...]:
        return ("scancel", "--quiet", job)

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        require_one_launcher(env)
        self.require_inside(env)
        own_nodes = nodes(env)
        any_gpus = has_gpus(env) or controller.has_gpus(controller.own_job(env))
        devices = _devices(own_nodes, env) if any_gpus else {}
        slots = self.settings_in(description).tasks_per_node
        hosts = [
            Host(name=node.name, slots=slots or node.slots, gpus=devices.get(node.name))
            for node in own_nodes
        ]
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        if shutil.which("srun", path=env.get("PATH")) is None:
            raise StartError("srun is not on the PATH", hint="load Slurm's module")
        by_name = {node.name: node for node in nodes(env)}
        return SrunStarter(description.python, by_name, step_environ(env))

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """KillWait, the time from SIGTERM to SIGKILL, less the time of a sweep."""
        wait_s = controller.kill_wait_s(controller.config(env))
        return None if wait_s is None else max(1.0, wait_s - 5.0)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        return controller.ending(controller.own_job(env), controller.starts_before(env))

    def array_index(self, env: Mapping[str, str]) -> str | None:
        return env.get("SLURM_ARRAY_TASK_ID")

    def job(self, env: Mapping[str, str]) -> str:
        return env.get("SLURM_JOB_ID", "")

    def is_started_again(self, env: Mapping[str, str]) -> bool:
        return env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")

    def require_requeuable(self, env: Mapping[str, str]) -> None:
        facts, why = controller.own_job(env), None
        if facts.get("BatchFlag") == "0":
            why = f"job {self.job(env)} has no batch script that could be started again"
        elif facts.get("Requeue") == "0":
            why = f"job {self.job(env)} may not be requeued (Requeue=0)"
        if why is not None:
            raise StartError(
                f"restart.on_time_limit is 'requeue', but {why}",
                hint="`sbatch --requeue job.sh`, or `tfcluster launch` outside of a "
                "job, which submits one that can be requeued",
            )

    def requeue(self, env: Mapping[str, str]) -> str | None:
        return controller.requeue(env)


def _devices(
    nodes: tuple[SlurmNode, ...], env: Mapping[str, str]
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on each node, from a step that runs there. Raises StartError."""
    devices: dict[str, tuple[str, ...] | None] = {}
    for group, gpus in dict.fromkeys((node.group, node.gpus) for node in nodes):
        names = [n.name for n in nodes if (n.group, n.gpus) == (group, gpus)]
        argv = gpu_question_argv(names, group=group, gpus=gpus)
        answer = asker(step_environ(env), _ASK_S)(argv)
        if answer.exit_code != 0:
            unknown = ("the nodes' GPUs cannot be queried", None)
            text, hint = meaning(answer.stderr) or unknown
            raise StartError(f"{text}: {own_words(answer.stderr)}", hint=hint)
        devices.update(parse_gpus(answer.stdout))
    silent = [node.name for node in nodes if node.name not in devices]
    if silent:
        raise StartError(f"{', '.join(silent)}: did not report the job's GPUs")
    return devices


SCHEDULER = SlurmScheduler()

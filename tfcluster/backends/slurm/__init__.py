"""Slurm: the hosts of the job that we are in; srun steps start the agents."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping

from tfcluster.backends.base import Backend, Starter
from tfcluster.backends.queries import ask
from tfcluster.backends.slurm import gpus
from tfcluster.backends.slurm.controller import Controller
from tfcluster.backends.slurm.srun import meaning, own_words, step_environ
from tfcluster.backends.slurm.starter import SrunStarter
from tfcluster.backends.slurm.variables import (
    Node,
    is_inside,
    nodes,
    require_one_launcher,
)
from tfcluster.errors import ExitCode, StartError
from tfcluster.model import Allocation, Description, Host

_ASK_S = 90.0


class SlurmBackend:
    """Hosts and slots from the job's and step's variables, GPUs from the nodes."""

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        require_one_launcher(env)
        if not is_inside(env):
            raise StartError(
                "not inside a Slurm job",
                hint="`tfcluster launch` submits one; `salloc -N 4` gives a shell in "
                "one",
            )
        found = nodes(env)
        has_gpus = gpus.has_gpus(env) or Controller(env).has_gpus()
        devices = _devices(found, env) if has_gpus else {}
        asked = description.slurm.tasks_per_node
        return Allocation(
            hosts=tuple(
                Host(
                    name=node.name,
                    slots=asked or node.slots,
                    gpus=devices.get(node.name),
                )
                for node in found
            )
        )

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        if shutil.which("srun", path=env.get("PATH")) is None:
            raise StartError("srun is not on the PATH", hint="load Slurm's module")
        known = {node.name: node for node in nodes(env)}
        return SrunStarter(description.python, known, step_environ(env))

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """KillWait, the time from SIGTERM to SIGKILL, less the time of a sweep."""
        wait_s = Controller(env).kill_wait_s()
        return None if wait_s is None else max(1.0, wait_s - 5.0)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        return Controller(env).ending()

    def array_index(self, env: Mapping[str, str]) -> str | None:
        return env.get("SLURM_ARRAY_TASK_ID")

    def harmless_signals(self, description: Description) -> frozenset[signal.Signals]:
        return frozenset()

    def job(self, env: Mapping[str, str]) -> str:
        return env.get("SLURM_JOB_ID", "")

    def is_started_again(self, env: Mapping[str, str]) -> bool:
        return env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")

    def require_requeuable(self, env: Mapping[str, str]) -> None:
        if why := Controller(env).why_not_requeuable():
            raise StartError(
                f"restart.on_time_limit is 'requeue', but {why}",
                hint="`sbatch --requeue job.sh`, or `tfcluster launch` outside of a "
                "job, which submits one that can be requeued",
            )

    def requeue(self, env: Mapping[str, str]) -> str | None:
        return Controller(env).requeue()


def _devices(
    found: tuple[Node, ...], env: Mapping[str, str]
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on each node, from a step that runs there. Raises StartError."""
    devices: dict[str, tuple[str, ...] | None] = {}
    for group, count in dict.fromkeys((node.group, node.gpus) for node in found):
        here = [n.name for n in found if (n.group, n.gpus) == (group, count)]
        argv = gpus.question_argv(here, group=group, count=count)
        devices.update(gpus.parse(_ask(argv, env)))
    silent = [node.name for node in found if node.name not in devices]
    if silent:
        raise StartError(f"{', '.join(silent)}: did not report the job's GPUs")
    return devices


def _ask(argv: tuple[str, ...], env: Mapping[str, str]) -> str:
    try:
        done = ask(argv, step_environ(env), _ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"the nodes' GPUs cannot be queried: {error}") from error
    if done.returncode != 0:
        said = done.stderr
        text, hint = meaning(said) or ("the nodes' GPUs cannot be queried", None)
        raise StartError(f"{text}: {own_words(said)}", hint=hint)
    return done.stdout


BACKEND: Backend = SlurmBackend()

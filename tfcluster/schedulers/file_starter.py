"""Starts agents through commands that pass no input on: pbs_tmrsh, blaunch.

The other host runs a private file in a shared folder, so that nothing has to be quoted.
It starts a program that connects back to us: the connection is the agent's channel.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfcluster.base.errors import StartError
from tfcluster.base.state_folder import state_path
from tfcluster.plan.model import Host, Interpreter
from tfcluster.schedulers.agent_bundle import agent_argv, parcel
from tfcluster.schedulers.connect_back import CallerReception
from tfcluster.schedulers.job_hosts import gpu_question, gpus_on, is_one_of, own_names
from tfcluster.schedulers.process_channel import (
    ConnectedChannel,
    OwnHostStarter,
    ProcessChannel,
)
from tfcluster.schedulers.starting import AgentChannel

START_S = 60.0
"""How long a process on another host may take to connect."""
_END_S = 6.0
_HINT = "hosts of the job must be able to connect to the launcher's host"
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,%~-]+")


class FileStarter:
    """Starts agents by ``argv_on(host)``; the one of this host as a child process."""

    def __init__(
        self,
        python: Interpreter,
        argv_on: Callable[[str], tuple[str, ...]],
        env: Mapping[str, str],
    ) -> None:
        self._python = python
        self._own = own_names(env)
        self._argv_on = argv_on
        self._env = env

    def start_agent(self, host: Host) -> AgentChannel:
        """Raises StartError."""
        if is_one_of(host.name, self._own):
            return OwnHostStarter().start_agent(host)
        folder = shared_folder(self._env)
        try:
            channel = self._start(host, folder)
            channel.write(parcel())
        except OSError as error:
            text = f"{host.name}: no agent could be started: {error}"
            raise StartError(text) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return channel

    def _start(self, host: Host, folder: Path) -> ConnectedChannel:
        reception = CallerReception([host.name])
        (folder / "program").write_text(reception.program(host.name) + "\0")
        argv = agent_argv(host.python or self._python)
        line = f"exec {shlex.join(argv)} < {folder / 'program'}\n"
        argv = shell_argv(self._argv_on, host.name, folder, line)
        try:
            # A channel, for its last words and its end; nothing is read from it.
            process = ProcessChannel(host.name, argv, env=self._env)
            until_s = time.monotonic() + START_S
            caller = reception.caller(host.name, lambda: until_s, process.is_over)
        finally:
            reception.close()
        if caller is None:
            over = process.is_over()
            cause = f"no agent has connected in {START_S:g} s"
            if over:
                cause = f"no agent could be started: {process.diagnosis()}"
            process.release(_END_S)
            raise StartError(f"{host.name}: {cause}", hint=None if over else _HINT)
        return ConnectedChannel(
            caller.connection,
            lambda _: process.diagnosis(),
            lambda: process.release(_END_S),
        )


def shared_folder(env: Mapping[str, str]) -> Path:
    """A new private folder in the state folder. Raises StartError."""
    root = state_path(env)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix="start-", dir=root))
    except OSError as error:
        raise StartError(f"{root}: {error.strerror}") from error
    if not _PLAIN.fullmatch(str(folder)):
        folder.rmdir()
        hint = "set TFCLUSTER_STATE_DIR to a path of letters, digits and . _ + @ = , -"
        raise StartError(f"{folder} cannot be passed to other hosts", hint=hint)
    return folder


def shell_argv(
    argv_on: Callable[[str], tuple[str, ...]], host: str, folder: Path, line: str
) -> tuple[str, ...]:
    """The command that has ``/bin/sh`` read ``line`` on a host, from a file."""
    file = folder / f"{host}.sh"
    file.write_text(line)
    return (*argv_on(host), "/bin/sh", str(file))


def ask_gpus(
    hosts: Sequence[str],
    argv_on: Callable[[str], tuple[str, ...]],
    env: Mapping[str, str],
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on other hosts, as each sees them. Raises StartError."""
    folder, line = shared_folder(env), gpu_question() + "\n"
    try:
        return gpus_on(hosts, lambda host: shell_argv(argv_on, host, folder, line), env)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

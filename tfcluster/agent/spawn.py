"""Executes programs with their environments, or explains why that is not possible."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tfcluster.agent.file_names import local_name, raw
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.protocol.wire import INTER_OP_THREADS, INTRA_OP_THREADS

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables by which gRPC finds a proxy; it prefers ``no_grpc_proxy``."""
_NO_GRPC_PROXY = "no_grpc_proxy"
_THREADS = {
    INTRA_OP_THREADS: "TF_NUM_INTRAOP_THREADS",
    INTER_OP_THREADS: "TF_NUM_INTEROP_THREADS",
}

Changes = Mapping[str, str | None]


def adapted(base: Mapping[bytes, bytes], changes: Changes) -> dict[str, str | None]:
    """``changes`` of the environment ``base``, with what follows from both."""
    adapted_changes = dict(changes)

    def value(name: str) -> str:
        if name in adapted_changes:
            return adapted_changes[name] or ""
        return os.fsdecode(base.get(raw(name), b""))

    for given, name in _THREADS.items():
        if (threads := value(given)) and not value(name):
            adapted_changes[name] = threads
    if any(map(value, _PROXIES)):
        # TensorFlow's servers use gRPC, which would ask the proxy for the other tasks.
        exempt = value(_NO_GRPC_PROXY) or value("no_proxy")
        hosts = _hosts(adapted_changes.get("TF_CONFIG"))
        words = [word.strip() for word in exempt.split(",")] + hosts
        words += ["localhost", "127.0.0.1", "::1"]
        adapted_changes[_NO_GRPC_PROXY] = ",".join(filter(None, dict.fromkeys(words)))
    return adapted_changes


def _hosts(tf_config: str | None) -> list[str]:
    """The hosts of all tasks, from the TF_CONFIG that the launcher has made."""
    if not tf_config:
        return []
    cluster = json.loads(tf_config).get("cluster", {})
    addresses = [address for job in cluster.values() for address in job]
    return [address.rpartition(":")[0].strip("[]") for address in addresses]


Environment = Mapping[bytes, bytes]

# Read before the agent installs its handlers. Some schedulers send warning signals to
# every process of a job; agents are started there with these signals ignored.
IGNORED_AT_START = tuple(
    number
    for number in (signal.SIGUSR1, signal.SIGUSR2)
    if signal.getsignal(number) is signal.SIG_IGN
)


class SpawnError(Exception):
    """The program was not started; the message says why."""


@dataclass(frozen=True, slots=True)
class SpawnedProgram:
    """What to execute, in a new session."""

    argv: Sequence[str]
    env: Environment
    cwd: str


def environment(base: Environment, changes: Mapping[str, str | None]) -> Environment:
    """``base`` with ``changes``; None removes a variable."""
    env = dict(base)
    for name, value in changes.items():
        if value is None:
            env.pop(raw(name), None)
        else:
            env[raw(name)] = raw(value)
    return env


def with_folders_first(
    base: Environment, changes: Mapping[str, str | None], folders: Mapping[str, str]
) -> dict[str, str | None]:
    """``changes``, with a folder prepended to each of these search path variables."""
    changed = dict(changes)
    for name, folder in folders.items():
        before = (
            changed[name] if name in changed else os.fsdecode(base.get(raw(name), b""))
        )
        # No empty entry: it would stand for the working directory.
        changed[name] = f"{folder}{os.pathsep}{before}" if before else folder
    return changed


def spawn(
    program: SpawnedProgram,
    output: int,
    *inherited: int,
    stdin: int = subprocess.DEVNULL,
) -> int:
    """Start the program with ``output`` as stdout and stderr; raises SpawnError.

    Returns its pid; the caller must reap it. The descriptors ``inherited`` keep their
    numbers. Signals that were ignored when the agent was started are ignored there.
    """
    if not program.argv or not program.argv[0]:
        raise SpawnError("the command is empty")
    try:
        with _ignoring(IGNORED_AT_START):
            process = subprocess.Popen(
                [raw(word) for word in program.argv],
                env=program.env,
                cwd=raw(program.cwd),
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
                start_new_session=True,
            )
    except OSError as error:
        raise SpawnError(_cause(program, error)) from error
    except ValueError as error:  # a NUL, or '=' in a name, or a lone surrogate
        raise SpawnError(f"cannot be executed: {error}") from error
    # The agent's loop reaps all children; Popen must not reap this one.
    process.returncode = 0
    return process.pid


@contextmanager
def _ignoring(signals: Sequence[int]) -> Iterator[None]:
    """Programs started inside ignore the signals: exec keeps SIG_IGN, not handlers."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(program: SpawnedProgram, error: OSError) -> str:
    command, cwd = program.argv[0], local_name(program.cwd)
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        limit = "out of memory" if error.errno == errno.ENOMEM else ""
        return f"cannot fork ({limit or 'RLIMIT_NPROC or pids.max'})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files (ulimit -n)"
    if error.errno == errno.E2BIG:
        return "the arguments and environment together are too long for this system"
    if not os.path.isdir(cwd):
        what = "is not a folder" if os.path.exists(cwd) else "does not exist"
        return f"workdir {program.cwd} {what}"
    if not os.access(cwd, os.X_OK):
        return f"workdir {program.cwd} cannot be entered: permission denied"
    path = os.path.join(cwd, local_name(command))
    return _command_cause(command, path, error)


def _command_cause(command: str, path: str, error: OSError) -> str:
    bare = "/" not in command
    if error.errno == errno.ENOENT and bare:
        return f"{command!r} not found on PATH"
    if error.errno == errno.ENOENT and os.path.exists(path):
        return f"{command!r}: its interpreter (the #! line) does not exist"
    if error.errno == errno.ENOENT:
        return f"{command!r} does not exist"
    if error.errno == errno.EACCES and not bare and os.path.isdir(path):
        return f"{command!r} is a folder"
    if error.errno == errno.EACCES:
        return f"{command!r} is not executable"
    if error.errno == errno.ENOEXEC:
        return f"{command!r} is not a program (it has no #! line)"
    return f"{command!r} cannot be executed: {error.strerror}"

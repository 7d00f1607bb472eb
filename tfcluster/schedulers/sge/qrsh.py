"""``qrsh -inherit``: a process on another host of the same job, and its channel.

Such a process is part of the job: Grid Engine accounts for it and ends it with the job.
Knows neither agents nor frames.
"""

from __future__ import annotations

import os
import select
import shlex
from collections.abc import Sequence

from tfcluster.base.errors import StartError
from tfcluster.schedulers.process_channel import ProcessChannel

START_S = 60.0
"""How long Grid Engine may take to start a process on the other host."""
_END_S = 3.0
"""How long qrsh may take to exit after SIGTERM; it notifies the other side first."""

_SHIELD = 'trap "" USR1 USR2; '
"""The signals of -notify go to every process of a task, and would kill processes that
have no handler."""
_BECOME = 'exec "$0" "$@"'
_READY = "echo; "
"""qrsh may lose input that it gets before the process runs, and then the process never
runs (seen with 8.1.9). So the process prints an empty line when it is ready."""

_MEANINGS = (
    (
        "didn't accept task",
        "Grid Engine accepts no task there: the parallel environment needs "
        "`control_slaves TRUE` (`qconf -sp NAME` shows it), and a slot must be free",
    ),
    ("can't resolve host name", "Grid Engine cannot resolve that host's name"),
    ("failed sending task to execd", "its sge_execd does not answer"),
)


def qrsh_argv(qrsh: str, host: str, argv: Sequence[str]) -> tuple[str, ...]:
    """The argv that runs ``argv`` on ``host``, named exactly as in PE_HOSTFILE.

    The user's shell on that host parses the words again, so each word is quoted.
    Standard input stays open (no ``-nostdin``), because it is the agent's channel.
    """
    over_there = ("/bin/sh", "-c", _SHIELD + _READY + _BECOME, *argv)
    return (qrsh, "-inherit", host, *map(shlex.quote, over_there))


def shielded(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` with SIGUSR1 and SIGUSR2 ignored: the launcher handles them."""
    return ("/bin/sh", "-c", _SHIELD + _BECOME, *argv)


def meaning(words: str) -> str | None:
    """An explanation of qrsh's message, or None if it is unknown."""
    return next((text for sign, text in _MEANINGS if sign in words), None)


def start_process(
    host: str, argv: Sequence[str], timeout_s: float = START_S
) -> ProcessChannel:
    """Start ``argv``, made by ``qrsh_argv``; returns once the process on the host runs.

    Raises StartError.
    """

    def explained(words: str, end: str) -> str:
        text = meaning(words)
        return f"{text}: {end}" if text else ""

    channel = ProcessChannel(host, argv, end_s=_END_S, explain=explained)
    readable, _, _ = select.select([channel], [], [], timeout_s)
    if readable and os.read(channel.fileno(), 1):
        return channel
    if readable:
        cause = channel.diagnosis() or "qrsh ended"
    else:
        cause = f"Grid Engine started nothing there in {timeout_s:g} s"
    channel.release(_END_S)
    raise StartError(f"{host}: no agent could be started: {cause}")

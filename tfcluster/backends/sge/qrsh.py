"""``qrsh -inherit``: a process on another host of the same job, and its channel.

What is started in this way is the job's own: it is counted, and ended with it. Knows
no agent and no frames.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
from collections.abc import Sequence

from tfcluster.backends.local import ProcessChannel
from tfcluster.errors import StartError

START_S = 60.0
"""How long Grid Engine may take to start a process over there."""
_END_S = 3.0
"""How long qrsh may take to end when asked to; it tells the other side first."""

_SHIELD = 'trap "" USR1 USR2; '
"""The warnings of -notify go to every process of a task, and would end those that know
nothing of them."""
_BECOME = 'exec "$0" "$@"'
_READY = "echo; "
"""What qrsh is given before the process runs may get lost, and then it never runs (seen
with 8.1.9, whenever the input was there first): so the process says an empty line."""

_MEANINGS = (
    (
        "didn't accept task",
        "Grid Engine takes no task there: the parallel environment needs "
        "`control_slaves TRUE` (`qconf -sp NAME` shows it), and a slot must be free",
    ),
    ("can't resolve host name", "Grid Engine cannot resolve that host's name"),
    ("failed sending task to execd", "its sge_execd does not answer"),
)


def qrsh_argv(qrsh: str, host: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Runs ``argv`` on ``host``, which must be named as PE_HOSTFILE does.

    The user's shell over there reads the words once more, so each is quoted. Standard
    input stays open (no ``-nostdin``): it is what an agent lives on.
    """
    over_there = ("/bin/sh", "-c", _SHIELD + _READY + _BECOME, *argv)
    return (qrsh, "-inherit", host, *map(shlex.quote, over_there))


def shielded(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` on this host, deaf to the warnings that the launcher hears itself."""
    return ("/bin/sh", "-c", _SHIELD + _BECOME, *argv)


def meaning(words: str) -> str | None:
    """What qrsh's message means for a person, if it is a known one."""
    return next((text for sign, text in _MEANINGS if sign in words), None)


class QrshChannel(ProcessChannel):
    """The standard streams of a process over there, by way of our child qrsh."""

    def wait_until_ready(self, host: str, timeout_s: float = START_S) -> None:
        """Until the process runs; nothing must be written before. Raises StartError."""
        readable, _, _ = select.select([self._stdout], [], [], timeout_s)
        if readable and os.read(self._stdout, 1):
            return
        if readable:
            cause = self.diagnosis() or "qrsh ended"
        else:
            cause = f"Grid Engine started nothing there in {timeout_s:g} s"
            self.kill()
        raise StartError(f"{host}: no agent could be started: {cause}")

    def kill(self) -> None:
        self.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                continue
            return

    def diagnosis(self) -> str:
        """How it ended, with what that means in front where it is known."""
        plain = super().diagnosis()
        text = meaning(self.last_words())
        return f"{text}: {plain}" if text else plain

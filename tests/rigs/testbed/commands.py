"""Runs commands and waits for conditions, with deadlines and explanatory errors.

Knows nothing of hosts.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tests.kit.waiting import eventually

T = TypeVar("T")


class RigError(Exception):
    """The rig, or a program on it, failed."""


class Unavailable(RigError):
    """This machine cannot run such a rig; the message is one line that says why."""


class CommandFailed(RigError):
    """A command exited with a code other than 0."""

    def __init__(self, argv: Sequence[str], code: int, output: str) -> None:
        shown = shlex.join(argv)
        super().__init__(f"{shown[:400]}\nexited with {code}:\n{output.strip()}")
        self.code = code


def run(
    argv: Sequence[str], *, stdin: str = "", timeout_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit code.

    Raises RigError if it does not end in time; the command and its descendants are
    then killed.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            out, err = process.communicate()
            raise RigError(
                f"{shlex.join(argv)[:400]}\nnot done after {timeout_s:g} s:\n{out}{err}"
            ) from None
        except BaseException:
            kill_tree(process.pid)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def check(argv: Sequence[str], *, stdin: str = "", timeout_s: float = 30.0) -> str:
    """The standard output of a command. Raises CommandFailed if the command fails."""
    done = run(argv, stdin=stdin, timeout_s=timeout_s)
    if done.returncode:
        raise CommandFailed(argv, done.returncode, done.stdout + done.stderr)
    return done.stdout


def wait_until(
    condition: Callable[[], T], what: str, timeout_s: float, *, poll_s: float = 0.02
) -> T:
    """As ``eventually``, but raises RigError."""
    try:
        return eventually(condition, what, timeout_s, poll_s=poll_s)
    except AssertionError as error:
        raise RigError(str(error)) from None


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, indented for a message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"    ({error})"
    return "\n".join(f"    {line}" for line in lines[-count:]) or "    (empty)"


def children(pid: int) -> list[int]:
    """Child processes of ``pid`` that have not been waited for."""
    with suppress(OSError):
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in listed.split()]
    return []


def kill_tree(pid: int) -> None:
    """Send KILL to a process and its descendants, to the descendants first."""
    for each in reversed(list(_tree(pid))):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _tree(child)

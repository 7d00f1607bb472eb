"""Sends signals to exactly the intended processes, never to a reused pid."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from tfcluster.agent import proc
from tfcluster.agent.proc import ProcessEntry
from tfcluster.protocol.frames import ProtocolError

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants (prctl(2)); False if impossible."""
    try:
        import ctypes  # some builds of Python have none
    except ImportError:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def send(process: ProcessEntry, signum: int) -> None:
    """Send a signal, unless the process is gone or may not be signalled."""
    descriptor = -1
    # Older kernels and Pythons have no pidfds, and sandboxes forbid them.
    with suppress(AttributeError, OSError):
        descriptor = os.pidfd_open(process.pid)
    try:
        # A pidfd pins the pid: if it is still the same process now, it stays so.
        if descriptor < 0 and _same(process):
            os.kill(process.pid, signum)
        elif _same(process):
            signal.pidfd_send_signal(descriptor, signum)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _same(process: ProcessEntry) -> bool:
    now = proc.read(process.pid)
    return now is not None and now.start_time == process.start_time and not now.dead


def send_group(leader: int, signum: int) -> None:
    """Signal the process group of a child of ours that has not been reaped yet."""
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        # A forked child that has not called setsid() yet.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(leader, signum)
    except PermissionError:
        pass  # a set-user-id program: it is reported if it survives SIGKILL


def signal_number(name: str) -> int:
    """The opposite of ``signal_name``, for names. Raises ProtocolError."""
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        raise ProtocolError(f"no signal is called {name!r}") from None


def signal_name(signum: int) -> str:
    """A signal's name: ``KILL``; ``RTMIN+3`` for a real-time signal without a name."""
    try:
        return signal.Signals(signum).name.removeprefix("SIG")
    except ValueError:
        return f"RTMIN+{signum - signal.SIGRTMIN}"


def end_words(status: int) -> str:
    """How a process ended: ``was killed by SIGKILL``, ``ended with exit code 1``."""
    if os.WIFSIGNALED(status):
        return f"was killed by SIG{signal_name(os.WTERMSIG(status))}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"

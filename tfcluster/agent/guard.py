"""The guard: a process that only exists to outlive the agent and clean up after it.

It forks the agent before anything else, and adopts its tasks if it dies.
``docs/protocols.md`` explains the exit codes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent import proc
from tfcluster.agent.proc import OPEN_FILES
from tfcluster.agent.signals import adopt_orphans, end_words
from tfcluster.agent.sweep import clear_away, sweep
from tfcluster.base.process_title import set_title

EXIT_CLOSED = 0
EXIT_LEASE_ENDED = 10
EXIT_FAULT = 11
EXIT_AGENT_DIED = 12
EXIT_TERMINATED = 143
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
AWAITED = (*FORWARDED, signal.SIGCHLD)
IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP)
_RUN = b"run "
_CLEAN = b"clean"


class GuardSocket:
    def __init__(self, end: socket.socket, guard: int) -> None:
        self.guard = guard
        """The guard's pid."""
        self._end = end
        end.setblocking(False)

    def fileno(self) -> int:
        return self._end.fileno()

    def guard_is_dead(self) -> bool:
        """Whether the guard is dead: while alive, it never writes and never closes."""
        try:
            return not self._end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_run(self, run: str) -> None:
        self._write(_RUN + run.encode("utf-8", "surrogateescape"))

    def send_clean(self) -> None:
        """Say that everything is stopped and the exit that follows is intended."""
        self._write(_CLEAN)

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # the guard is dead
            self._end.sendall(line + b"\n")


def guarded(serve: Callable[[GuardSocket], int]) -> int:
    """Run ``serve`` in a child; returns its exit code, or cleans up after its death."""
    adopt_orphans()
    proc.allow_open_files(OPEN_FILES)  # a task takes five descriptors, a port two
    # A signal that comes before its handler exists would end the guard alone.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*AWAITED, *IGNORED})
    ours, theirs = socket.socketpair()
    guard = os.getpid()
    agent = os.fork()
    if agent == 0:
        ours.close()
        _become_agent(serve, GuardSocket(theirs, guard))
    theirs.close()
    return _watch(agent, ours)


def _become_agent(
    serve: Callable[[GuardSocket], int], guard_socket: GuardSocket
) -> None:
    code = EXIT_FAULT
    set_title("tfcluster: agent", "tfcluster-agent")
    try:
        _own_session()
        code = serve(guard_socket)
    except BaseException:
        import traceback  # only here: it takes long to import

        traceback.print_exc()
    finally:
        # Not sys.exit: a thread may hang in a file system that does not respond.
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _own_session() -> None:
    with suppress(PermissionError):  # it is a group leader already
        os.setsid()


def _watch(agent: int, guard_socket: socket.socket) -> int:
    """Wait for the agent and clean up after it. ``AWAITED`` must be blocked."""
    set_title("tfcluster: guard", "tfcluster-guard")
    _own_session()
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    # Otherwise the guard would keep the channel open after the agent closed it.
    leave_standard_streams()
    status = _wait_for(agent)
    run, clean = _heard(guard_socket)
    if clean and os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    killed = sweep(run)
    clear_away(run)
    when = "" if os.WIFSIGNALED(status) else " before it had cleaned up"
    sys.stderr.write(
        f"tfcluster: the agent {end_words(status)}{when}; "
        f"{len(killed)} processes were killed\n"
    )
    return EXIT_AGENT_DIED


def leave_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _wait_for(agent: int) -> int:
    while (status := _reap(agent)) is None:
        # All of these stay blocked: a handler could run too late, after the guard has
        # begun to wait for its children.
        signum = signal.sigwait(AWAITED)
        if signum != signal.SIGCHLD:
            # Only we reap the agent, so its pid cannot have been reused.
            os.kill(agent, signum)
    return status


def _reap(agent: int) -> int | None:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, agent):
            return status if pid else None


def _heard(guard_socket: socket.socket) -> tuple[str | None, bool]:
    run, clean, data = None, False, b""
    guard_socket.setblocking(False)
    with suppress(OSError):
        while part := guard_socket.recv(4096):
            data += part
    for line in data.split(b"\n")[:-1]:
        if line.startswith(_RUN):
            run = line[len(_RUN) :].decode("utf-8", "surrogateescape")
        clean = clean or line == _CLEAN
    return run, clean

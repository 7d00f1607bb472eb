"""Forks a task from the warm interpreter, in the state of a newly started process.

Knows processes, descriptors, signals and the state of Python's modules, but not what
the task will run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import decoder, encode
from tfcluster.protocol.wire import Decoder

_FIRST_FREE_FD = 3


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The initial state of a task's process."""

    env: Mapping[str, str | None]
    """Changes to the environment; None removes a variable."""
    cwd: str
    output: int
    """Descriptor that becomes standard output and error."""
    events: int
    """Descriptor that stays open; TFCLUSTER_EVENTS gets its number."""


class ForkMessage(Struct):
    """Base class of what the new processes tell the parent."""


class Pid(ForkMessage):
    """The task's process exists."""

    pid: int


class FailedMessage(ForkMessage):
    cause: str


_decode = decoder(ForkMessage)


def fork_task(request: ForkRequest) -> int | None:
    """Fork twice; return the task's pid in the parent, and None in the task.

    The process in between has ended on return, so the task's parent is the nearest
    subreaper. Raises OSError if the task cannot be started.
    """
    report, writer = os.pipe()
    middle = _fork()
    if middle == 0:
        os.close(report)
        if _fork_on(writer, request):
            return None
    os.close(writer)
    try:
        with os.fdopen(report, "rb") as stream:
            messages = [*map(_decode, Decoder().feed(stream.read()))]
    finally:
        os.waitpid(middle, 0)
    for message in messages:
        if isinstance(message, FailedMessage):
            raise OSError(message.cause)
    return next(message.pid for message in messages if isinstance(message, Pid))


def _fork_on(writer: int, request: ForkRequest) -> bool:
    """In the middle process: fork the task and exit. Returns True in the task only."""
    middle_ended, middle_lives = os.pipe()
    try:
        child = _fork()
        if child:
            os.write(writer, encode(Pid(child)))
            os._exit(0)
        # Wait for the middle process to end: it would still be the task's parent.
        os.close(middle_lives)
        os.read(middle_ended, 1)
        _become_task(request, keep=writer)
    except OSError as error:
        os.write(writer, encode(FailedMessage(str(error))))
        os._exit(1)
    os.close(writer)
    return True


def _fork() -> int:
    """Call os.fork without its warning about threads."""
    # Python 3.12 warns about forks with threads. Here the threads are OpenBLAS's, which
    # stops and restarts its threads around a fork.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_task(request: ForkRequest, *, keep: int) -> None:
    os.setsid()
    os.chdir(request.cwd)
    _take_descriptors(request, keep)
    _reset_signals()
    for name, value in request.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ["TFCLUSTER_EVENTS"] = str(request.events)
    _renew_module_state()


def _take_descriptors(request: ForkRequest, keep: int) -> None:
    """Keep the standard streams, the events socket and ``keep``; close all others."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(request.output, 1)
    os.dup2(request.output, 2)
    start = _FIRST_FREE_FD
    for kept in sorted({request.events, keep}):
        os.closerange(start, kept)
        start = kept + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _reset_signals() -> None:
    """Reset signal handlers to the state of a new process.

    SIGUSR1 and SIGUSR2, with which schedulers warn, stay ignored if they are.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        warns = number in (signal.SIGUSR1, signal.SIGUSR2)
        if not (warns and signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _renew_module_state() -> None:
    """Renew state that forked tasks would share: random generators, authkey, folder."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing" in sys.modules:
        from multiprocessing import current_process, process

        current_process().authkey = os.urandom(32)
        # Spawned children resolve a relative script path against it.
        process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]

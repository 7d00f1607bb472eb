"""The state of a task's process at its start, to which it returns for a new start.

Programs change this state, and ``execve`` keeps it. Knows nothing about modules.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

_LIMITS = {
    name: number for name, number in vars(resource).items() if name.startswith("RLIMIT")
}
_LIMITS_OF_IMPORTS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_STACK")
"""What an import needs: memory and threads. Other limits are for later."""
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

Limits = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StartState:
    """What ``execve`` keeps, except for signals that are ignored and open files."""

    folder: str
    umask: int
    cpus: frozenset[int]
    limits: Limits
    ignored: frozenset[int]
    """Signals that were ignored."""

    @classmethod
    def of_this_process(cls) -> StartState:
        mask = os.umask(0o077)
        os.umask(mask)
        return cls(
            folder=os.getcwd(),  # noqa: PTH109 - no path object
            umask=mask,
            cpus=frozenset(os.sched_getaffinity(0)),
            limits=limits(),
            ignored=frozenset(
                number
                for number in signal.valid_signals()
                if signal.getsignal(number) is signal.SIG_IGN
            ),
        )

    def changed_limit(self) -> str | None:
        """The name of a limit that the program has changed before an import."""
        now = limits()
        names = (n for n in _LIMITS_OF_IMPORTS if now.get(n) != self.limits.get(n))
        return next(names, None)

    def restore(self, kept: Iterable[int]) -> None:
        """Return to this state, and close all files except ``kept`` and the streams.

        A limit or CPU that the program has given up cannot always be had again.
        """
        for before, after in pairwise((2, *sorted(kept), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(before + 1, after)
        with suppress(OSError):
            os.chdir(self.folder)
        os.umask(self.umask)
        for name, pair in self.limits.items():
            with suppress(OSError, ValueError):
                resource.setrlimit(_LIMITS[name], pair)
        with suppress(OSError):
            os.sched_setaffinity(0, self.cpus)
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            # Handlers end with the process image; only the main thread may set them.
            with suppress(OSError, ValueError):
                ignore = number in self.ignored
                signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL)


def limits() -> Limits:
    """The soft and hard limits of this process, by their names."""
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def native_environ() -> dict[str, str]:
    """The environment that libraries see, which need not be that of ``os.environ``."""
    environ = {}
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    index = 0
    while entries and (entry := entries[index]) is not None:
        name, _, value = os.fsdecode(entry).partition("=")
        environ[name] = value
        index += 1
    return environ

"""Starts daemons in the foreground, watches them and stops them.

Knows no particular daemon.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.rigs.testbed.commands import RigError, children, last_lines, wait_until
from tests.rigs.testbed.namespaces import Namespaces

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_STOP_S = 10.0


class InsideProcess(subprocess.Popen[bytes]):
    """A program inside namespaces; signals go to it, not to the ``nsenter`` before it.

    ``pid`` is that of nsenter and ``inside_pid`` that of the program, both in this
    machine's PID namespace.
    """

    @property
    def inside_pid(self) -> int:
        """The program's pid, once it has started. Raises RigError if it has ended."""
        found = wait_until(
            lambda: children(self.pid) or self.poll() is not None,
            f"process behind {self.pid}",
            _STOP_S,
        )
        if isinstance(found, list):
            return found[0]
        raise RigError(f"process behind {self.pid} has ended with {self.returncode}")

    def send_signal(self, sig: int) -> None:
        with suppress(RigError, ProcessLookupError):
            os.kill(self.inside_pid, sig)
            if sig in (signal.SIGKILL, signal.SIGCONT):
                # nsenter stops when the program does, and must run to see its end.
                os.kill(self.pid, signal.SIGCONT)


class Daemon:
    """A daemon that can be stopped and started again."""

    def __init__(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._argv = tuple(argv)
        self._env = {"PATH": PATH, "LANG": "C.UTF-8", **(env or {})}
        self._process: InsideProcess | None = None
        self._begin = 0
        self.log = log

    def start(self, where: Namespaces) -> None:
        """Start it; ``wait_ready`` waits until it can be used."""
        words = [f"{name}={value}" for name, value in self._env.items()]
        with self.log.open("ab") as log:
            self._begin = log.tell()
            self._process = InsideProcess(
                where.enter("env", "-i", "-C", "/", *words, *self._argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What it has written since its last start."""
        with self.log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, ready: Callable[[], object], timeout_s: float) -> None:
        """Raises RigError with its last lines if it ends, or is not ready in time."""
        try:
            wait_until(
                lambda: ready() or not self.alive, f"{self._argv[0]} ready", timeout_s
            )
        except RigError as error:
            raise RigError(f"{error}\n{self._story}") from error
        if not self.alive:
            raise RigError(f"{self._argv[0]} has ended\n{self._story}")

    @property
    def _story(self) -> str:
        return f"the end of {self.log}:\n{last_lines(self.log)}"

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End the daemon itself; processes that it started for users continue."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_STOP_S)
            self._process = None

"""Channels to agents: to a child process, and to a process that connects to us."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from tfcluster.base.errors import StartError
from tfcluster.base.isolated_import import module_argv
from tfcluster.plan.model import Host
from tfcluster.schedulers.starting import is_readable

READ_BYTES = 1 << 18
LAST_WORDS_BYTES = 4096
GUARD_S = 6.0
"""How long the guard may take to kill what its agent has left."""


class ProcessChannel:
    """The channel to a child process, perhaps a scheduler's that passes it on.

    ``end_s`` is how long a scheduler's command may take to end what it has started;
    ``explain`` gives the meaning of its words and exit, "" if unknown.
    """

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        end_s: float | None = None,
        explain: Callable[[str, str], str] = lambda words, end: "",
    ) -> None:
        """Start ``argv`` in a new session. Raises StartError."""
        self._end_s = end_s
        self._explain = explain
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as we do
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                env=env,
            )
        except OSError as error:
            raise StartError(f"{host}: cannot start {argv[0]}: {error}") from error
        assert self._process.stdin is not None  # both are pipes; this is for mypy
        assert self._process.stdout is not None
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout.fileno()

    def fileno(self) -> int:
        return self._stdout

    def read(self) -> bytes:
        return os.read(self._stdout, READ_BYTES)

    def has_unread(self) -> bool:
        return is_readable(self._stdout)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._stdin, view) :]

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        if self._end_s is not None:
            self.terminate(self._end_s)
            return
        # Our child is the agent's guard, which kills what the agent leaves, then exits.
        import psutil  # imported here: few launches need it

        with contextlib.suppress(psutil.NoSuchProcess):
            for agent in psutil.Process(self._process.pid).children():
                agent.kill()
        self.is_over(GUARD_S)
        self._process.kill()
        self._process.wait()

    def terminate(self, timeout_s: float) -> None:
        """End the child with SIGTERM or SIGKILL, each for ``timeout_s``."""
        self.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            if self.is_over(timeout_s):
                return

    def release(self, timeout_s: float) -> None:
        """``terminate``, and close what a launcher leaves open until its own end."""
        self.terminate(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Whether the child has ended, or ends in this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def diagnosis(self) -> str:
        if not self.is_over(2.0):
            return ""
        code, words = self._process.returncode, self.last_words()
        end = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if words:
            end += f": {words.splitlines()[-1]}"
        return self._explain(words, end) or end

    def last_words(self, size: int = LAST_WORDS_BYTES) -> str:
        """The last ``size`` bytes of the child's standard error so far, as text."""
        # No seek: the child shares the position, and another thread may read.
        end = os.fstat(self._stderr.fileno()).st_size
        data = os.pread(self._stderr.fileno(), size, max(0, end - size))
        return data.decode(errors="backslashreplace").strip()


def agent_argv() -> tuple[str, ...]:
    """The argv of an agent on this machine, from this copy of the package."""
    return module_argv((sys.executable,), "tfcluster.agent", options=("-I", "-S"))


class OwnHostStarter:
    """Starts agents on this machine, as child processes with our environment."""

    def start_agent(self, host: Host) -> ProcessChannel:
        return ProcessChannel(host.name, agent_argv())


WORDS_S = 2.0
"""How long to wait for the last words of a process that we have not ended."""


class ConnectedChannel:
    """The standard input and output of a process that has connected to us.

    ``words`` gives its last words, perhaps only after the given number of seconds;
    ``leave`` is called once the channel is unused.
    """

    def __init__(
        self,
        connection: socket.socket,
        words: Callable[[float], str],
        leave: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._words = words
        self._leave = leave
        self._ended_by = ""
        """Who ended the connection first: "us" or "process"."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES)
        except ConnectionResetError:  # it had not read everything that we sent
            data = b""
        self._ended_by = self._ended_by or ("" if data else "process")
        return data

    def has_unread(self) -> bool:
        return is_readable(self._connection.fileno())

    def write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError:
            self._ended_by = self._ended_by or "process"
            raise

    def close(self) -> None:
        self._ended_by = self._ended_by or "us"
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        # The agent ends its tasks when it reads the end of file, as over SSH.
        self._ended_by = self._ended_by or "us"
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._leave()

    def diagnosis(self) -> str:
        words = self._words(0.0 if self._ended_by == "us" else WORDS_S)
        self._leave()
        return words

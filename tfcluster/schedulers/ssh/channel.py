"""A session on an SSH connection, as the byte channel to an agent.

Knows how such a session ends and what it then reports; knows no frames.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

from tfcluster.schedulers.ssh.errors import ended, no_agent
from tfcluster.schedulers.ssh.paramiko_import import paramiko
from tfcluster.schedulers.starting import is_readable

READ_BYTES = 1 << 18
LAST_WORDS_BYTES = 4096
STATUS_S = 2.0
"""How long the exit status may take to arrive after the end of output."""


class SshChannel:
    """Standard input and output of a remote program; ends with its connection.

    ``hang_up`` closes the connection.
    """

    def __init__(
        self,
        python: str,
        session: paramiko.Channel,
        hang_up: Callable[[], None],
    ) -> None:
        self._python = python
        self._session = session
        self._hang_up = hang_up
        self._told = False
        self._errors: deque[int] = deque(maxlen=LAST_WORDS_BYTES)
        self._output = _Readable()
        # A buffer only calls set and clear of its event, which we provide.
        session.in_buffer.set_event(self._output)  # type: ignore[arg-type]

    def fileno(self) -> int:
        return self._output.descriptor

    def read(self) -> bytes:
        """The next bytes. Raises OSError if the session did not end properly."""
        # A full window for errors would block an agent that writes many. Each of its
        # heartbeats brings us here.
        while self._session.recv_stderr_ready():
            self._errors.extend(self._session.recv_stderr(READ_BYTES))
        data = self._session.recv(READ_BYTES)
        if not data:
            self._ended()
        return data

    def has_unread(self) -> bool:
        """Whether the session has unread output, or its connection has any data."""
        if self._session.recv_ready():
            return True
        connection = self._session.get_transport().sock
        if isinstance(connection, paramiko.Channel):  # through a jump host
            return connection.recv_ready()
        return is_readable(connection.fileno())

    def write(self, data: bytes) -> None:
        try:
            self._session.sendall(data)
        except (EOFError, paramiko.SSHException) as error:
            raise ConnectionError("the SSH connection was lost") from error

    def close(self) -> None:
        # If the connection is already lost, the other side notices that, too.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._session.shutdown_write()

    def kill(self) -> None:
        self._hang_up()

    def diagnosis(self) -> str:
        """How the program ended. Also closes the connection."""
        status, words = self._status(), self._words()
        self._hang_up()
        # Nothing signals the descriptor any more, so it can be closed.
        self._session.in_buffer.set_event(threading.Event())
        self._output.close()
        return "" if self._told else ended(status, words.splitlines())

    def _ended(self) -> None:
        """Raise ConnectionError if the connection was lost or no agent could start."""
        if not self._session.eof_received:
            self._told = True
            raise ConnectionError("the SSH connection was lost")
        cause = no_agent(self._python, self._status(), self._words())
        if cause is not None:
            self._told = True
            hint = f" ({cause.hint})" if cause.hint else ""
            raise ConnectionError(cause.message + hint)

    def _status(self) -> int | None:
        # No status: a signal killed the program. paramiko does not report exit-signal.
        if not self._session.status_event.wait(STATUS_S):
            return None
        status = self._session.exit_status
        return None if status < 0 else status

    def _words(self) -> str:
        self._session.settimeout(STATUS_S)
        with contextlib.suppress(TimeoutError):
            while data := self._session.recv_stderr(READ_BYTES):
                self._errors.extend(data)
        return bytes(self._errors).decode(errors="backslashreplace").strip()


class _Readable:
    """A descriptor that is readable while the event is set, for paramiko's buffers.

    A buffer sets its event while it holds data or has been closed, and clears it
    otherwise, always under its lock. Two buffers, each with its own lock, share the
    descriptor of paramiko's own ``fileno``, which may therefore miss a change.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False

    def set(self) -> None:
        if not self._set:
            self._set = True
            os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        if self._set:
            self._set = False
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Close the descriptor, once."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

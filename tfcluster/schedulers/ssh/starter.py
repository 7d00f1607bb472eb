"""Starts agents on hosts over SSH, by the routes that ssh_config gives.

A session on the SSH connection is the byte channel to an agent.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfcluster.agent import proc
from tfcluster.base.errors import HostError, StartError
from tfcluster.plan.model import Description, Host, Interpreter
from tfcluster.schedulers.agent_bundle import agent_argv, parcel
from tfcluster.schedulers.ssh import errors
from tfcluster.schedulers.ssh.config import Directive, parse
from tfcluster.schedulers.ssh.connect import SshConnections, answers, open_session
from tfcluster.schedulers.ssh.errors import ended, no_agent
from tfcluster.schedulers.ssh.paramiko_import import paramiko
from tfcluster.schedulers.ssh.route import Sources, route
from tfcluster.schedulers.starting import ANSWER_S, is_readable

READ_BYTES = 1 << 18
LAST_WORDS_BYTES = 4096
STATUS_S = 2.0
"""How long the exit status may take to arrive after the end of output."""


class SshChannel:
    """The streams of a remote program; ``hang_up`` closes the connection."""

    def __init__(
        self, python: str, session: paramiko.Channel, hang_up: Callable[[], None]
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
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_FILES_PER_HOST = 4
"""A connection, a descriptor for its output, and two more for a sweep at the end."""
_OTHER_FILES = 512
_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")


@dataclass(frozen=True, slots=True)
class SshStarter:
    """Starts agents over SSH, on hosts that are listed or that a scheduler names."""

    sources: Sources
    listed: frozenset[str]
    """The hosts of the configuration: they stay ours, whatever a scheduler does."""
    python: Interpreter
    connections: SshConnections

    def start_agent(self, host: Host) -> SshChannel:
        way = route(host, self.sources)
        python = host.python or self.python
        try:
            line = remote_command(agent_argv(python))
        except ValueError as error:
            raise StartError(f"{host.name}: {error}") from error
        transport = self.connections.open(way)
        session = open_session(transport, way)
        try:
            session.exec_command(line)
        except (paramiko.SSHException, EOFError, OSError) as error:
            transport.close()
            raise errors.no_session(way, str(error)) from error
        channel = SshChannel(shlex.join(python), session, transport.close)
        # If this fails, reading from the channel reports why.
        with contextlib.suppress(OSError):
            channel.write(parcel())
        return channel

    def answers(self, host: Host) -> bool:
        """Whether the host answers; False behind a jump host, which would answer."""
        return host.name in self.listed and answers(route(host, self.sources), ANSWER_S)


def ssh_starter(description: Description, env: Mapping[str, str]) -> SshStarter:
    """Raises HostError if ssh_config cannot be read or used."""
    proc.allow_open_files(_OTHER_FILES + _FILES_PER_HOST * len(description.hosts))
    sources = _sources(description, env)
    for host in description.hosts:
        route(host, sources)  # an error is reported before anything starts
    listed = frozenset(host.name for host in description.hosts)
    return SshStarter(sources, listed, description.python, SshConnections())


def _sources(description: Description, env: Mapping[str, str]) -> Sources:
    account = pwd.getpwuid(os.getuid())
    home = Path(env.get("HOME") or account.pw_dir)
    config_file = description.ssh.config_file
    files = (
        (config_file,) if config_file else (home / ".ssh" / "config", _SYSTEM_CONFIG)
    )
    return Sources(
        directives=tuple(
            directive for path in files for directive in _directives(path, home)
        ),
        ssh=description.ssh,
        timeout_given="ssh.connect_timeout" in description.origins,
        home=home,
        me=account.pw_name,
    )


def _directives(path: Path, home: Path) -> tuple[Directive, ...]:
    try:
        text = path.read_text(errors="surrogateescape")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from error
    own = path.parent if path == _SYSTEM_CONFIG else home / ".ssh"

    def included(pattern: str) -> Iterator[tuple[str, str]]:
        if pattern.startswith("~/"):
            pattern = str(home / pattern[2:])
        # Path.glob accepts no absolute patterns.
        for name in sorted(glob.glob(str(own / pattern))):  # noqa: PTH207
            try:
                yield name, Path(name).read_text(errors="surrogateescape")
            except OSError as error:
                raise HostError(f"{name}: {error.strerror}") from error

    return parse(str(path), text, included)


_PLAIN = re.compile(rb"[A-Za-z0-9_./:,@%+=-]+")
_PARTS = re.compile(rb"\\|'|!|[^\\'!]+")
_BACKSLASHED = (b"\\", b"'", b"!")
"""Special even between single quotes: ``\\`` in fish, ``!`` in csh."""


def remote_command(argv: Sequence[str]) -> bytes:
    """A line that makes sh, bash, zsh, csh or fish ``exec`` the words of ``argv``.

    Raises ValueError for NUL and newlines, which cannot be quoted for all of them, and
    for a program that would be an option of ``exec``.
    """
    if not argv or argv[0].startswith("-"):
        raise ValueError(f"{argv[:1]!r} names no program")
    return b"exec " + b" ".join(_quoted(os.fsencode(word)) for word in argv)


def _quoted(word: bytes) -> bytes:
    if any(byte in word for byte in (b"\0", b"\n", b"\r")):
        raise ValueError(f"{word!r} cannot be passed through a login shell")
    if _PLAIN.fullmatch(word):
        return word
    if not word:
        return b"''"
    return b"".join(
        b"\\" + part if part in _BACKSLASHED else b"'" + part + b"'"
        for part in _PARTS.findall(word)
    )

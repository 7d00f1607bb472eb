"""Starts agents on hosts over SSH, by the routes that ssh_config gives."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfcluster.agent import proc
from tfcluster.base.errors import HostError, StartError
from tfcluster.plan.model import Description, Host, Interpreter
from tfcluster.schedulers.agent_bundle import agent_argv, parcel
from tfcluster.schedulers.ssh import errors
from tfcluster.schedulers.ssh.channel import SshChannel
from tfcluster.schedulers.ssh.config import Directive, parse
from tfcluster.schedulers.ssh.connect import SshConnections, answers, open_session
from tfcluster.schedulers.ssh.paramiko_import import paramiko
from tfcluster.schedulers.ssh.route import Sources, route
from tfcluster.schedulers.starting import ANSWER_S

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

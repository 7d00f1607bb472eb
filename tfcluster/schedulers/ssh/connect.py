"""Connections along routes: TCP, jumps or a command; host keys; authentication.

All decisions about trust are made here. ``errors`` has the error messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfcluster.schedulers.ssh import errors
from tfcluster.schedulers.ssh.errors import SshStage
from tfcluster.schedulers.ssh.known_hosts import HostKey, Keys, listed_keys
from tfcluster.schedulers.ssh.paramiko_import import paramiko
from tfcluster.schedulers.ssh.route import Route

ATTEMPTS = 5
KEEPALIVE_S, KEEPALIVES = 5, 5
"""The kernel gives up after 25 s. The launcher decides earlier that a host is lost."""
_RETRY_S = (0.2, 1.0)
"""The range of the random wait before a retry, multiplied by the attempt's number: sshd
drops connections at random (MaxStartups in sshd_config(5))."""
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_MAX_KNOWN_BYTES = 1 << 24

# Without a handler, Python would print paramiko's log to stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _TurnedAway(Exception):
    """The host ended the connection before the key exchange; a retry may help."""

    def __init__(self, stage: SshStage, cause: str) -> None:
        super().__init__(cause)
        self.stage = stage


class SshConnections:
    """Opens connections; connections to jump hosts are shared."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Route, threading.Lock] = {}
        self._jumps: dict[Route, paramiko.Transport] = {}

    def open(self, route: Route) -> paramiko.Transport:
        """An authenticated connection. Raises HostError."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._open(route)
            except _TurnedAway as error:
                if attempt == ATTEMPTS:
                    cause = str(error)
                    raise errors.dropped(route, error.stage, cause, attempt) from error
            time.sleep(attempt * random.uniform(*_RETRY_S))  # not for cryptography
        raise AssertionError("unreachable")

    def _open(self, route: Route) -> paramiko.Transport:
        with contextlib.ExitStack() as stack:
            link = self._link(route)
            stack.callback(link.close)
            transport = paramiko.Transport(link)
            stack.callback(transport.close)
            _greet(transport, route)
            _log_in(transport, route)
            transport.set_keepalive(KEEPALIVE_S)
            stack.pop_all()
            return transport

    def _link(self, route: Route) -> Any:
        """The socket-like object that carries the connection."""
        if route.via is not None:
            return self._jump(route, route.via)
        if route.proxy_command is not None:
            return _command_link(route, route.proxy_command)
        return _tcp(route)

    def _jump(self, route: Route, via: Route) -> paramiko.Channel:
        transport = self._shared(via)
        try:
            return transport.open_channel(
                "direct-tcpip",
                (route.hostname, route.port),
                ("127.0.0.1", 0),
                timeout=route.timeout_s,
            )
        except paramiko.ChannelException as error:
            raise errors.no_jump(route, via, error.text) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise errors.no_jump(route, via, _cause(error)) from error

    def _shared(self, route: Route) -> paramiko.Transport:
        with self._guard:
            lock = self._locks.setdefault(route, threading.Lock())
        with lock:
            transport = self._jumps.get(route)
            if transport is None or not transport.is_active():
                transport = self._jumps[route] = self.open(route)
            return transport


def _tcp(route: Route) -> socket.socket:
    """A connection to one of the host's addresses. Raises HostError."""
    deadline = time.monotonic() + route.timeout_s
    try:
        addresses = socket.getaddrinfo(
            route.hostname, route.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise errors.unreachable(route, error) from error
    last: OSError = OSError("it has no address")
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        left_s = max(0.1, deadline - time.monotonic())
        link = socket.socket(family, kind, protocol)
        link.settimeout(left_s / (len(addresses) - number))
        try:
            link.connect(address)
        except OSError as error:
            link.close()
            last = error
        else:
            _keep_alive(link)
            link.settimeout(None)
            return link
    raise errors.unreachable(route, last) from last


def answers(route: Route, patience_s: float) -> bool:
    """Whether the host's sshd, not only its kernel, sends something."""
    if route.via is not None or route.proxy_command is not None:
        return False
    deadline = time.monotonic() + patience_s
    try:
        with socket.create_connection((route.hostname, route.port), patience_s) as link:
            link.settimeout(max(0.1, deadline - time.monotonic()))
            return bool(link.recv(1))
    except OSError:
        return False


def _keep_alive(link: socket.socket) -> None:
    """Let the kernel detect a dead host, whether or not anything is sent."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, KEEPALIVES),
        (socket.TCP_USER_TIMEOUT, KEEPALIVE_S * KEEPALIVES * 1000),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def _command_link(route: Route, command: str) -> socket.socket:
    """A socket to the stdin and stdout of a ProxyCommand, which ends with it."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # ssh_config(5): a shell runs it, with exec.
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise errors.proxy_ended(route, _cause(error)) from error
    reaper = threading.Thread(target=process.wait, name="proxy", daemon=True)
    reaper.start()
    return ours


def _greet(transport: paramiko.Transport, route: Route) -> None:
    """Do banner, key exchange and host key check. Raises HostError or _TurnedAway."""
    keys = listed_keys(_texts(route.known_hosts), route.key_name)
    _prefer(transport, keys)
    deadline = time.monotonic() + route.timeout_s
    transport.banner_timeout = transport.handshake_timeout = route.timeout_s
    transport.auth_timeout = transport.channel_timeout = route.timeout_s
    try:
        transport.start_client(timeout=route.timeout_s)
        shown = transport.get_remote_server_key()
    except (paramiko.SSHException, EOFError, OSError) as error:
        stage = SshStage.BANNER if transport.remote_version else SshStage.TCP
        if time.monotonic() >= deadline - 0.05:
            raise errors.stuck(route, stage) from error
        if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
            raise errors.dropped(route, stage, _cause(error), 1) from error
        if route.proxy_command and stage is SshStage.TCP:
            raise errors.proxy_ended(route, _cause(error)) from error
        raise _TurnedAway(stage, _cause(error)) from error
    _check(route, HostKey(shown.get_name(), shown.asbytes()), keys)


def _texts(files: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as file:
            yield str(path), file.read(_MAX_KNOWN_BYTES).decode(errors="replace")


def _prefer(transport: paramiko.Transport, keys: tuple[HostKey, ...]) -> None:
    """Prefer the key types that we know for this host, which may have several keys.

    Ciphers that need no MAC come first; those that OpenSSH has given up are not used.
    """
    kinds: list[str] = []
    for key in keys:
        kinds += _RSA if key.type == "ssh-rsa" else (key.type,)
    options = transport.get_security_options()
    first = [kind for kind in kinds if kind in options.key_types]
    options.key_types = tuple(dict.fromkeys((*first, *options.key_types)))
    ciphers = [cipher for cipher in options.ciphers if "cbc" not in cipher]
    options.ciphers = tuple(sorted(ciphers, key=lambda cipher: "gcm" not in cipher))
    options.digests = tuple(
        digest
        for digest in options.digests
        if "md5" not in digest and not digest.endswith("-96")
    )


def _check(route: Route, shown: HostKey, keys: tuple[HostKey, ...]) -> None:
    same = [key for key in keys if key.blob == shown.blob]
    for key in same:
        if key.revoked:
            raise errors.revoked_key(route, shown, key)
    others = [key for key in keys if not key.revoked]
    if not same and others:
        raise errors.changed_key(route, shown, others[0])
    if not same:
        raise errors.unknown_key(route, shown)


def _log_in(transport: paramiko.Transport, route: Route) -> None:
    """Try the keys one by one. Raises HostError."""
    deadline = time.monotonic() + route.timeout_s
    keys = Keys(route)
    refused: list[str] = []
    accepted: Sequence[str] = ()
    try:
        for name, key in keys.candidates():
            try:
                accepted = transport.auth_publickey(route.user, key)
            except paramiko.BadAuthenticationType as error:
                accepted = error.allowed_types
                break
            except paramiko.AuthenticationException:
                refused.append(name)
                if not transport.is_active():
                    break
                continue
            if not accepted:
                return
            refused.append(f"{name} (accepted, but not enough)")
            break
        else:
            accepted = _offered(transport, route.user)
    except (paramiko.SSHException, EOFError, OSError) as error:
        if time.monotonic() >= deadline - 0.05:
            raise errors.stuck(route, SshStage.KEYS) from error
        raise errors.dropped(route, SshStage.KEYS, _cause(error), 1) from error
    raise errors.denied(
        route,
        accepted=accepted,
        refused=refused,
        locked=keys.locked,
        unusable=keys.unusable,
    )


def _offered(transport: paramiko.Transport, user: str) -> Sequence[str]:
    """The authentication methods of the host, from its refusal of "none"."""
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return error.allowed_types
    except (paramiko.SSHException, EOFError, OSError):
        pass
    return ()


def open_session(transport: paramiko.Transport, route: Route) -> paramiko.Channel:
    """A session without terminal, agent forwarding or X11. Raises HostError."""
    try:
        return transport.open_session(timeout=route.timeout_s)
    except paramiko.ChannelException as error:
        raise errors.no_session(route, error.text) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if transport.is_active():
            raise errors.stuck(route, SshStage.AUTH) from error
        raise errors.dropped(route, SshStage.AUTH, _cause(error), 1) from error


def _cause(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "end of file"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    first = str(error).partition("\n")[0].strip()
    return first[:200] or type(error).__name__

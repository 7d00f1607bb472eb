"""Where the sockets of this host's kept interpreters are. Knows nothing of messages.

They are in a private folder of the user, which several hosts may share. So their names
begin with an identifier of the host.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import suppress

from tfcluster.agent import proc

_SUFFIX = ".sock"
_UNUSED_S = 8 * 86_400.0
"""Longer than any interpreter is kept."""
_WAITING = 16
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def _folder(environ: Mapping[str, str]) -> str:
    """The folder of the sockets.

    Not /run/user/UID, which is gone once the SSH session of an agent has ended.
    """
    if state := environ.get("TFCLUSTER_STATE_DIR"):
        return f"{state}/warm"
    home = environ.get("HOME") or os.path.expanduser("~")
    base = environ.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return f"{base}/tfcluster/warm"


def _is_private(folder: str) -> bool:
    """Whether it is a folder of this user that is closed to others."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return ours and not found.st_mode & 0o077


def sockets(environ: Mapping[str, str]) -> list[str]:
    """The paths of all sockets of this host, oldest first."""
    folder, found = _folder(environ), []
    if _is_private(folder):
        for name in os.listdir(folder):
            if name.startswith(_host()) and name.endswith(_SUFFIX):
                path = f"{folder}/{name}"
                with suppress(OSError):
                    found.append((os.lstat(path).st_mtime, path))
    return [path for _, path in sorted(found)]


def listen(environ: Mapping[str, str]) -> tuple[socket.socket, str]:
    """A new listening socket, and its path. Raises OSError."""
    folder = _folder(environ)
    _make_private(folder)
    if not _is_private(folder):
        raise OSError(errno.EPERM, f"{folder} is open to other users, or not yours")
    _remove_old(folder)
    path = f"{folder}/{_host()}{os.urandom(4).hex()}{_SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _Short(path) as short:
            listener.bind(short)
        os.chmod(path, 0o600)
        listener.listen(_WAITING)
    except OSError:
        listener.close()
        raise
    return listener, path


def _remove_old(folder: str) -> None:
    """Remove the sockets of hosts that were switched off, which nobody uses.

    Interpreters update the time of their socket when they are used.
    """
    oldest = time.time() - _UNUSED_S
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):
            if path.endswith(_SUFFIX) and os.lstat(path).st_mtime < oldest:
                remove(path)


def _make_private(folder: str) -> None:
    """Make the folder and its missing parents, for this user only."""
    if not os.path.isdir(folder):
        _make_private(os.path.dirname(folder))
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def connect(path: str, timeout_s: float) -> socket.socket:
    """Connect to a socket of this user. Raises OSError.

    The socket of an interpreter that has died is removed.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(timeout_s)
    try:
        with _Short(path) as short:
            end.connect(short)
        peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
    except ConnectionRefusedError:
        end.close()
        remove(path)
        raise
    except OSError:
        end.close()
        raise
    return end


def remove(path: str) -> None:
    """Remove a socket and its log."""
    for each in (path, log_of(path)):
        with suppress(OSError):
            os.unlink(each)


def log_of(path: str) -> str:
    """The log file of the interpreter with this socket."""
    return path.removesuffix(_SUFFIX) + ".log"


def _host() -> str:
    """The start of a name that no other host uses."""
    network = "".join(filter(str.isdigit, proc.network()))
    return f"{proc.boot_id()[:13]}-{network}-"


class _Short:
    """A short name for a path: a Unix socket's path has at most 107 bytes."""

    def __init__(self, path: str) -> None:
        self._folder, self._name = os.path.split(path)

    def __enter__(self) -> str:
        self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{self._name}"

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

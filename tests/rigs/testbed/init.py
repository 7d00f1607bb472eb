"""Process 1 of a rig or of a host: makes its mounts, then waits for orphans to end.

A separate program (run with ``-I -S``), whose only argument is JSON of
``namespaces.Setup``. If leased, it ends at the end of its standard input, unless it has
read ``keep`` before; the kernel then ends all processes of its PID namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

# mount(2), linux/mount.h
_NOSUID_NODEV = 2 | 4
_BIND = 4096
_MOVE = 8192
_RECURSIVE = 16384
_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str) -> None:
    given = (source, target, kind)
    words = [None if word is None else os.fsencode(word) for word in given]
    if _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data)):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} {target}: {os.strerror(code)}")


def _bind(source: str, target: str) -> None:
    _mount(source, target, None, _BIND | _RECURSIVE, "")


def _bind_file(source: str, target: str) -> None:
    """Bind over the file itself, after unmounting what is mounted there.

    If the source of a mount below ours were removed, our mount would go with it.
    """
    while _libc.umount2(os.fsencode(target), _DETACH) == 0:
        pass
    _bind(source, target)


def _mask(target: str, keep: list[str], mode: str) -> None:
    """Mount an empty folder over ``target``; the paths in ``keep`` stay visible."""
    stashes = []
    for number, path in enumerate(keep):
        # /dev/shm may be shared with rigs whose processes have the same ids.
        stash = f"/dev/shm/.kept-{os.urandom(8).hex()}-{number}"
        os.makedirs(stash)  # noqa: PTH103 - pathlib would double the time to start
        _bind(path, stash)
        stashes.append((stash, path))
    _mount("tmpfs", target, "tmpfs", _NOSUID_NODEV, f"mode={mode}")
    for stash, path in stashes:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103 - as above
        _mount(stash, path, None, _MOVE, "")
        os.rmdir(stash)  # noqa: PTH106 - as above


def _prepare(setup: dict[str, Any]) -> None:
    _mount("proc", "/proc", "proc", _NOSUID_NODEV, "")
    for source, target in setup["binds"]:
        _bind_file(source, target)
    for mask in setup["masks"]:
        _mask(**mask)
    for folder in setup["folders"]:
        os.makedirs(folder["path"], exist_ok=True)  # noqa: PTH103 - as above
        os.chmod(folder["path"], folder["mode"])  # noqa: PTH101 - as above
        os.chown(folder["path"], folder["owner"], folder["owner"])
    socket.sethostname(setup["hostname"])


def _wait_for_orphans() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve(*, leased: bool) -> None:
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    watched = [woken, sys.stdin.fileno()] if leased else [woken]
    while True:
        _wait_for_orphans()
        ready = select.select(watched, [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        if sys.stdin.fileno() in ready:
            if os.read(sys.stdin.fileno(), 64) != b"keep":
                return
            watched.remove(sys.stdin.fileno())


def _main() -> None:
    setup = json.loads(sys.argv[1])
    _prepare(setup)
    print("ready", flush=True)  # noqa: T201 - the rig waits for this line
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(leased=setup["leased"])


if __name__ == "__main__":
    _main()

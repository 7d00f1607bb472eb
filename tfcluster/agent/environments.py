"""Where environments are kept on a host, and who may use, make and remove them.

Each has a folder and, beside it, a lock: shared while it is used, exclusive while it is
made or removed. It is complete once its marker exists, which is written last.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator, Mapping

from tfcluster.base.light_dataclasses import dataclass

FOLDER = "environments"
MARKER = "tfcluster-complete.json"
_LOCK = ".lock"


def folder(environ: Mapping[str, str]) -> str:
    """The folder with all environments of this user on this host."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "tfcluster", FOLDER)


def maker_argv(request: int, answer: int) -> tuple[str, ...]:
    """The command to make an environment; the arguments are inherited descriptors."""
    from tfcluster.base.isolated_import import module_argv  # most agents do not need it

    maker = "tfcluster.agent.environment_maker"
    words = str(request), str(answer)
    return module_argv((sys.executable,), maker, *words, options=("-I", "-S"))


def is_complete(home: str) -> bool:
    """Whether the environment is complete, and its interpreter is still there."""
    python = os.path.join(home, "bin", "python")
    return os.path.exists(os.path.join(home, MARKER)) and os.path.lexists(python)


def open_lock(home: str) -> int:
    """The descriptor of the environment's lock file. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return os.open(home + _LOCK, flags, 0o600)


def try_lock(descriptor: int, kind: int) -> bool:
    """Take the lock, ``fcntl.LOCK_SH`` or ``LOCK_EX``; False if another one has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(home: str) -> int | None:
    """Keep the environment while we live; None: it is being removed. Raises OSError."""
    descriptor = open_lock(home)
    if try_lock(descriptor, fcntl.LOCK_SH) and is_complete(home):
        return descriptor
    os.close(descriptor)
    return None


@dataclass(frozen=True, slots=True)
class Environment:
    """An existing environment; ``used_s`` is the Unix time of its last use."""

    home: str
    used_s: float


def environments(environ: Mapping[str, str]) -> Iterator[Environment]:
    """All environments on this host, including incomplete ones."""
    where = folder(environ)
    try:
        names = sorted(os.listdir(where))
    except OSError:
        return
    for name in names:
        home = os.path.join(where, name)
        if name.endswith(_LOCK) or not os.path.isdir(home):
            continue
        marker = os.path.join(home, MARKER)
        try:
            used_s = os.stat(marker if os.path.exists(marker) else home).st_mtime
        except OSError:
            continue
        yield Environment(home, used_s)


def remove(home: str) -> bool:
    """Remove an environment; False if it is in use. Raises OSError."""
    import shutil  # only here: it takes long to import

    descriptor = open_lock(home)
    try:
        if not try_lock(descriptor, fcntl.LOCK_EX):
            return False
        # The marker goes first: without it, whatever is left is never used.
        marker = os.path.join(home, MARKER)
        if os.path.exists(marker):
            os.unlink(marker)
        shutil.rmtree(home)
    finally:
        os.close(descriptor)
    return True

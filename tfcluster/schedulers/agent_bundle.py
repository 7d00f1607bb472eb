"""Sends the agent over the channel, to hosts that have nothing but Python.

Before the first frame come a short program, a NUL, and the source of what hosts need of
this package, which the program unpacks into the user's cache, once per version.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import threading
from functools import cache
from pathlib import Path

from tfcluster.base.errors import StartError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.plan.model import Host, Interpreter
from tfcluster.schedulers.starting import AgentChannel

# Reads up to the first NUL, byte by byte so that it reads nothing beyond. Exits when
# the channel ends, with code 10 as the agent does, or when nothing arrives in time. Has
# no quotes, `!`, `$` and newlines, so that every login shell passes it on unchanged.
_PATIENCE_S = 120
_FIRST = (
    f"import os;import _signal;_signal.alarm({_PATIENCE_S});"
    "exec(bytes().join(iter(lambda:os.read(0,1)or os._exit(10),bytes(1))))"
)

# Becomes the first Python that is new enough. Its arguments are the program for Python,
# and the interpreter that runs this, which the host may have at the same path.
_OUTSIDE = (
    'for python in "$2" python3 python3.14 python3.13 python3.12 python3.11 python3.10;'
    ' do if "$python" -I -S -c "import sys; sys.exit(sys.version_info < (3, 10))"'
    ' </dev/null >/dev/null 2>&1; then exec "$python" -I -S -c "$1"; fi; done;'
    ' echo "no python3 of version 3.10 or newer is on the PATH of the host itself:'
    " tfcluster starts with it, and starts the command of 'python' later\" >&2; exit 1"
)

OLDEST_PYTHON = (3, 10)
OWN_WORDS = "tfcluster: "
"""The start of a line in which the program for hosts says why it ends."""

SHIPPED = (
    "__init__.py",
    "agent",
    "doctor/__init__.py",
    "doctor/probe.py",
    "base",
    "plan/__init__.py",
    "plan/model.py",
    "runtime",
    "protocol",
)
"""What runs on hosts: agent, runtime and probe, and everything they import."""

_packing = threading.Lock()

_RECEIVE = """\
import os, sys
size, digest = {size}, {digest!r}
if sys.version_info < {oldest!r}:
    sys.exit("tfcluster needs Python 3.10, this is %d.%d" % sys.version_info[:2])
data = bytearray()
while len(data) < size:
    part = os.read(0, size - len(data))
    if not part:
        sys.exit("tfcluster: the channel closed before the agent arrived")
    data += part
import _signal, zlib
# From here on, nothing waits for the channel, and the guard lives as long as the run.
_signal.alarm(0)
try:
    data = memoryview(zlib.decompress(data, 31))
except zlib.error:
    sys.exit("tfcluster: the agent was corrupted in transfer")
os.umask(0o077)
cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
folder = os.path.join(cache, "tfcluster")
home = os.path.join(folder, digest[:32])

def files():
    # The members of a plain ustar archive: a header of 512 bytes, then the bytes.
    at = 0
    while at < len(data) and data[at]:
        head = bytes(data[at:at + 512])
        name, start = head[345:500].rstrip(bytes(1)), head[:100].rstrip(bytes(1))
        name = name + b"/" + start if name else start
        length = int(head[124:136].rstrip(bytes(1)), 8)
        yield os.fsdecode(name), data[at + 512:at + 512 + length]
        at += 512 + (length + 511) // 512 * 512

def whole():
    # A cleaner or a power cut may have damaged what was unpacked here before.
    try:
        for name, content in files():
            with open(os.path.join(home, name), "rb", 0) as file:
                if file.read() != content:
                    return False
    except OSError:
        return False
    return True

def is_stale(name):
    import time
    try:
        changed = os.lstat(os.path.join(folder, name)).st_mtime
    except FileNotFoundError:  # another agent renamed or removed it just now
        return False
    return time.time() - changed > 3600

def unpack():
    import shutil, tempfile
    for name in os.listdir(folder):
        if name.startswith("tmp") and is_stale(name):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    fresh = tempfile.mkdtemp(dir=folder)
    try:
        for name, content in files():
            path = os.path.join(fresh, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        for _ in range(3):
            try:
                os.rename(fresh, home)
                return
            except OSError:
                if whole():  # another agent was faster
                    return
                aside = tempfile.mkdtemp(dir=folder)
                try:
                    os.rename(home, aside)
                except OSError:
                    pass
                shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)

def load():
    import importlib
    importlib.invalidate_caches()
    from tfcluster.agent import main, guard, supervisor
    return main

def forget():
    # The byte code is damaged: whole() does not check it.
    import shutil
    shutil.rmtree(home, ignore_errors=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfcluster"]:
        del sys.modules[name]

try:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        sys.exit("tfcluster: other users can write to " + folder)
    if not whole():
        unpack()
except OSError as error:
    why = error.strerror or str(error)
    hint = "free some space there, or set XDG_CACHE_HOME on this host to another folder"
    sys.exit("tfcluster: cannot store the agent in %s: %s (%s)" % (folder, why, hint))
sys.path.insert(0, home)
try:
    main = load()
except (ImportError, EOFError, ValueError, TypeError, SyntaxError):
    forget()
    unpack()
    main = load()
del data
sys.exit(main([]))
"""


def agent_argv(python: Interpreter) -> tuple[str, ...]:
    """The argv of a process that becomes an agent once it is sent a parcel.

    If ``python`` is a command, the agent runs outside of it: the agent has to see all
    processes of its host, and a container may hide them.
    """
    if len(python) == 1:
        return (*python, "-I", "-S", "-c", _FIRST)
    return ("/bin/sh", "-c", _OUTSIDE, "tfcluster", _FIRST, sys.executable)


def send_agent(channel: AgentChannel, host: Host) -> None:
    """Send what must precede frames. Raises StartError if the process has ended."""
    try:
        channel.write(parcel())
    except OSError as error:
        cause = channel.diagnosis() or str(error)
        text = f"{host.name}: no agent could be started: {cause}"
        raise StartError(text) from error


def parcel() -> bytes:
    """What precedes the first frame, packed once: a program, NUL, this package."""
    with _packing:  # called from many threads at once
        return _packed()


@cache
def _packed() -> bytes:
    """The same files always give the same bytes."""
    packed, root = io.BytesIO(), Path(PACKAGE_ROOT)
    parts = (root / "tfcluster" / name for name in SHIPPED)
    files = (p for part in parts for p in (part.rglob("*.py"), [part])[part.is_file()])
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(files):
            source = path.read_bytes()
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            entry.size, entry.mode = len(source), 0o600
            archive.addfile(entry, io.BytesIO(source))
    data = gzip.compress(packed.getvalue(), compresslevel=6, mtime=0)
    digest = hashlib.sha256(data).hexdigest()
    program = _RECEIVE.format(size=len(data), digest=digest, oldest=OLDEST_PYTHON)
    return program.encode() + b"\0" + data

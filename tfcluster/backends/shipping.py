"""The agent for hosts that have nothing but Python: sent over the channel, and kept.

Three things go over the channel before the first frame: a program of a few lines, its
end, and the source of what hosts need of this package. The program checks its hash and
unpacks it, once for each version, into the user's cache folder. Nothing else is left on
the host.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tfcluster.loading import PACKAGE_ROOT

# Reads up to the first NUL, byte by byte so that nothing after it is taken. Ends with
# the channel, as the agent does (exit code 10), or when nothing comes. Without quotes,
# `!`, `$` and line ends, so that every login shell passes it on unharmed.
_PATIENCE_S = 120
_FIRST = (
    f"import os;import _signal;_signal.alarm({_PATIENCE_S});"
    "exec(bytes().join(iter(lambda:os.read(0,1)or os._exit(10),bytes(1))))"
)

OLDEST_PYTHON = (3, 10)

SHIPPED = (
    "__init__.py",
    "agent",
    "doctor/__init__.py",
    "doctor/probe.py",
    "loading.py",
    "model.py",
    "runtime",
    "wire.py",
)
"""What runs on hosts: agent, runtime and probe, and all that these import."""

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
        sys.exit("tfcluster: the channel ended before the agent had come")
    data += part
os.umask(0o077)
cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
folder = os.path.join(cache, "tfcluster")
home = os.path.join(folder, digest[:32])
new = not os.path.isdir(home)
if new:
    # Not before: to import these takes as long as to start the agent.
    import hashlib, io, tarfile, tempfile
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit("tfcluster: the agent was damaged on its way")
os.makedirs(folder, mode=0o700, exist_ok=True)
status = os.stat(folder)
if status.st_uid != os.geteuid() or status.st_mode & 0o022:
    sys.exit("tfcluster: others may write to " + folder)
if new:
    fresh = tempfile.mkdtemp(dir=folder)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(fresh)
    try:
        os.rename(fresh, home)
    except OSError:  # another agent was faster
        import shutil
        shutil.rmtree(fresh, ignore_errors=True)
del data
sys.path.insert(0, home)
from tfcluster.agent import main
sys.exit(main([]))
"""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is to be sent before the first frame, and the hash that names it."""

    data: bytes
    digest: str


def agent_argv(python: str) -> tuple[str, ...]:
    """The argv that becomes an agent once a parcel was sent to it."""
    return (python, "-I", "-S", "-c", _FIRST)


def parcel() -> Parcel:
    """What hosts need of this package, packed once for all of them."""
    with _packing:  # all of them are connected to at once
        return _packed()


@lru_cache(maxsize=1)
def _packed() -> Parcel:
    return pack()


def pack() -> Parcel:
    """The same bytes for the same files."""
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
    return Parcel(program.encode() + b"\0" + data, digest)

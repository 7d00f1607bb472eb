"""Collects facts about a host: versions, GPUs, disks, limits, other hosts.

Runs on the host under the interpreter of the tasks, with only the standard library.
Prints one line of JSON per fact; does not judge them.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "tfcluster-fact "
MARKED_BY = "TFCLUSTER_RUN"
PACKAGES = ("tensorflow", "keras", "protobuf", "numpy")
CONNECT_S = 3.0
IMPORT_S = 60.0
QUERY_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Print the facts that ``argv`` asks for, as JSON."""
    request: dict[str, Any] = json.loads(argv[0])
    facts: dict[str, Callable[[], Any]] = {
        "clock": time.time,
        "python": platform.python_version,
        "executable": lambda: sys.executable,
        "marked": lambda: MARKED_BY in os.environ,
        "packages": packages,
        "peers": lambda: connect_all(request["peers"]),
        "gpus": gpus,
        "files": lambda: files(request["workdir"], request["scripts"]),
        "disks": lambda: disks(request["workdir"]),
        # The soft limit; -1: unlimited.
        "limits": lambda: {"open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]},
    }
    if request["imports"]:
        facts["import"] = import_time
    for name, fact in facts.items():
        try:
            value = fact()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            value = {"error": str(error)}
        sys.stdout.write(MARK + json.dumps([name, value]) + "\n")
        sys.stdout.flush()
    return 0


def packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def import_time() -> dict[str, Any]:
    """How long importing TensorFlow takes, or the last line of its error."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "import tensorflow"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=IMPORT_S,
        check=False,
    )
    seconds = round(time.monotonic() - begin, 1)
    if done.returncode == 0:
        return {"seconds": seconds}
    words = done.stderr.decode(errors="backslashreplace").strip().splitlines()
    return {"error": words[-1] if words else f"exit status {done.returncode}"}


def connect_all(peers: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """Peer -> result of connecting to its held port, see ``connect``."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        results = pool.map(lambda peer: connect(peer[1], peer[2]), peers)
        return {peer[0]: result for peer, result in zip(peers, results, strict=True)}


def connect(address: str, port: int) -> str:
    """``reached``, or why not. A refusal is ``reached``: nobody listens there yet."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return "reached"
    except ConnectionRefusedError:
        return "reached"
    except TimeoutError:
        return "no answer (firewall?)"
    except OSError as error:
        return str(error.strerror or error)


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs, with their memory in use (MiB)."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.used",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, timeout=QUERY_S, check=True)
    rows = [line.rpartition(",") for line in done.stdout.decode().splitlines()]
    return [{"name": name.strip(), "used_mib": int(used)} for name, _, used in rows]


def files(workdir: str | None, scripts: Sequence[str]) -> dict[str, bool]:
    if workdir is None:
        return {}
    folder = Path(workdir)
    there = {script: (folder / script).exists() for script in scripts}
    return {workdir: folder.is_dir(), **there}


def disks(workdir: str | None) -> dict[str, int]:
    places = (workdir or ".", str(Path.home()), "/tmp", "/dev/shm")
    return {p: shutil.disk_usage(p).free for p in places if Path(p).is_dir()}

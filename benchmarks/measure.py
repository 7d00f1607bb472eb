"""Times commands, takes medians of alternating trials, and prints tables of ratios."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: our time, and the time of the peer we compare it with."""

    what: str
    seconds: float
    peer: str
    peer_seconds: float
    target: float | None
    """The highest acceptable ratio; None: no target."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.peer_seconds


def command(name: str) -> str:
    """The path of a program, from this environment, or else from the PATH.

    Raises SystemExit if it is missing.
    """
    path = shutil.which(name, path=f"{BIN}:{os.environ.get('PATH', '')}")
    if path is None:
        raise SystemExit(f"{name} is missing: make bench installs what is needed")
    return path


def mpirun(count: int) -> list[str]:
    """The argv of Open MPI's mpirun for ``count`` processes on this machine.

    Allows more processes than cores. Skips other programs called mpirun, such as the
    one in MPICH's wheel. Raises SystemExit if Open MPI's mpirun is missing.
    """
    folders = [*os.environ.get("PATH", "").split(":"), str(BIN)]
    found = [shutil.which("mpirun", path=folder) for folder in folders]
    for path in filter(None, found):
        argv = [path, "--version"]
        said = subprocess.run(argv, capture_output=True, text=True, check=False)
        if "Open MPI" in said.stdout:
            words = [path, "--oversubscribe", "-n", str(count)]
            return [*words, "--allow-run-as-root"] if os.geteuid() == 0 else words
    raise SystemExit("Open MPI's mpirun is missing: install the package openmpi-bin")


def tfcluster(*words: str) -> list[str]:
    return [command("tfcluster"), *words]


@contextlib.contextmanager
def state() -> Iterator[dict[str, str]]:
    """An environment with an empty state folder, quiet TensorFlow, and our programs."""
    # An installed package has its bytecode; a source tree keeps it after a first run.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="tfcluster-bench-") as folder:
        yield {
            **inherited,
            "TFCLUSTER_STATE_DIR": f"{folder}/state",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
        }


def seconds(argv: Sequence[str], env: Mapping[str, str]) -> float:
    """The time that a command takes. Raises SystemExit with its output if it fails."""
    begin = time.perf_counter()
    done = subprocess.run(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    elapsed = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{argv} failed:\n{done.stdout.decode()[-3000:]}")
    return elapsed


def medians(
    trials: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, float]:
    """The median of each trial; trials take turns, so that drift affects all alike."""
    found: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(repeats):
        for name, trial in trials.items():
            found[name].append(trial())
    return {name: statistics.median(values) for name, values in found.items()}


def show(title: str, rows: Iterable[Row]) -> None:
    """Print the table in Markdown."""
    print(f"\n### {title}\n")
    print("| what | tfcluster | peer | peer's time | ratio | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        target = "" if row.target is None else f"{row.target:.2f}"
        cells = (
            row.what,
            f"{row.seconds:.3f} s",
            row.peer,
            f"{row.peer_seconds:.3f} s",
            f"**{row.ratio:.2f}**",
            target,
        )
        print(f"| {' | '.join(cells)} |", flush=True)

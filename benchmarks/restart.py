"""The time from killing a task until its script runs again, and of a fresh start."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import HERE, Row, show, state, tfcluster

RESTARTS = 5
DEADLINE_S = 60.0


def main() -> None:
    with state() as env, tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks"
        env["BENCH_MARKS"] = str(marks)
        program = str(HERE / "programs" / "mark.py")
        settings = (f"restart.max={RESTARTS}", "restart.scope=task")
        flags = [w for s in (*settings, "runtime.strategy=none") for w in ("--set", s)]
        argv = tfcluster("launch", "-n", "2", *flags, "--", "python", program)
        process = subprocess.Popen(
            argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            taken = [_kill_and_wait(marks, 2 + number) for number in range(RESTARTS)]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
        marks.unlink()
        begin = time.time()
        fresh = subprocess.Popen([sys.executable, program], env=env)
        cold = _wait(marks, 1)[-1][1] - begin
        fresh.kill()
        fresh.wait()
    median = statistics.median(taken)
    what = "kill -9 of a task until its script runs again"
    show("Restart", [Row(what, median, "python SCRIPT", cold, 1.0 / cold)])


def _kill_and_wait(marks: Path, count: int) -> float:
    """Seconds from killing the newest process until the next one runs its script."""
    pid, _ = _wait(marks, count)[-1]
    begin = time.time()
    os.kill(pid, signal.SIGKILL)
    return _wait(marks, count + 1)[-1][1] - begin


def _wait(marks: Path, count: int) -> list[tuple[int, float]]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines = marks.read_text().splitlines() if marks.exists() else []
        if len(lines) >= count:
            words = [line.split() for line in lines]
            return [(int(pid), float(at)) for pid, at, _ in words]
        time.sleep(0.005)  # polls a file that a task writes
    raise SystemExit("the task did not come up")


if __name__ == "__main__":
    main()

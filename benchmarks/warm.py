"""Times launches on a host kept warm (``tfcluster warm``), and on one that is not."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import HERE, Row, medians, seconds, show, state, tfcluster

REPEATS = 5
DIGITS = {"chief": 1, "worker": 2}
FOUR = {"worker": 4}
RATIO = 0.4
UP_S = 1.2


def main() -> None:
    rows = []
    first = _compared("first_step.py", DIGITS)
    what = "digits on 3 tasks: launch until the first step"
    rows.append(Row(what, first["warm"], "not kept warm", first["cold"], RATIO))
    four = _compared("keras_up.py", FOUR)
    what = "4 tasks: launch until all have imported Keras"
    target = UP_S / four["cold"]
    rows.append(Row(what, four["warm"], "not kept warm", four["cold"], target))
    show("Kept interpreters", rows)


def _compared(program: str, tasks: Mapping[str, int]) -> dict[str, float]:
    """The medians of a program's launches, with a kept interpreter and without one."""
    with _site(program, tasks) as cold, _site(program, tasks) as warm:
        # Both have been launched once, so that all files are in the page cache.
        seconds(tfcluster("launch", cold.config), cold.env)
        seconds(tfcluster("warm", warm.config, "--keep", "1h"), warm.env)
        warm.launch()
        try:
            took = partial(warm.launch, kept=True)
            return medians({"cold": cold.launch, "warm": took}, REPEATS)
        finally:
            seconds(tfcluster("warm", "--stop"), warm.env)


@dataclass(frozen=True, slots=True)
class Site:
    """A separate state folder and configuration."""

    config: str
    marks: Path
    env: Mapping[str, str]
    count: int

    def launch(self, *, kept: bool = False) -> float:
        """Seconds from the launch until the last task has written its mark."""
        self.marks.unlink(missing_ok=True)
        argv, begin = tfcluster("launch", self.config), time.time()
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode or ("took a kept interpreter" in done.stderr) < kept:
            raise SystemExit(f"{argv} failed:\n{done.stdout}{done.stderr}")
        marks = [float(line) for line in self.marks.read_text().splitlines()]
        if len(marks) != self.count:
            raise SystemExit(f"{len(marks)} of {self.count} tasks have written a mark")
        return max(marks) - begin


@contextmanager
def _site(program: str, tasks: Mapping[str, int]) -> Iterator[Site]:
    with state() as env:
        folder = Path(env["TFCLUSTER_STATE_DIR"]).parent
        marks = folder / "marks"
        description: dict[str, Any] = {
            "backend": "local",
            "workdir": str(folder),
            "command": ["python", str(HERE / "programs" / program)],
            "tasks": dict(tasks),
            "env": {"BENCH_MARKS": str(marks)},
            "runtime": {"require_exchange": False},
        }
        config = folder / "cluster.yaml"
        config.write_text(json.dumps(description))
        yield Site(str(config), marks, env, sum(tasks.values()))


if __name__ == "__main__":
    main()

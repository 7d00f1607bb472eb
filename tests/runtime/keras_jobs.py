"""Runs the programs in ``programs/cases`` as one process and on 2, 3 and 4 ranks.

So that this stays quick, a case runs on one of these numbers of ranks, in turn; those
in ``ON_ALL_SIZES`` run on each. TFCLUSTER_TEST_ALL_SIZES=1 runs all cases on each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.runtime.ranks import PROGRAMS, ROOT, Job, Ranks, run_jobs

SIZES = (2, 3, 4)
THEMES = (
    "callbacks",
    "inputs",
    "loops",
    "losses",
    "metrics",
    "models",
    "optimizers",
)
ON_ALL_SIZES = {
    "batches_of_one",
    "fit",
    "mean_by_weights",
    "tape_graph",
}
ON_THREE = {"dropout", "files", "one_rank_stops"}
"""Cases whose tests look at a certain rank."""
PER_WORKER = {"TFCLUSTER_RUNTIME": '{"batch": "per_worker"}'}

Values = Mapping[str, NDArray[Any]]


def cases_of(theme: str) -> list[str]:
    text = (PROGRAMS / "cases" / f"{theme}.py").read_text()
    return re.findall(r"^def case_(\w+)", text, re.MULTILINE)


EVERYTHING = os.environ.get("TFCLUSTER_TEST_ALL_SIZES") == "1"
LIMIT_S = 5400 if EVERYTHING else 1800


def sizes_of(case: str, place: int) -> tuple[int, ...]:
    if case in ON_ALL_SIZES or EVERYTHING:
        return SIZES
    return (3,) if case in ON_THREE else (SIZES[place % len(SIZES)],)


CASES = {
    case: (theme, sizes_of(case, place))
    for theme in THEMES
    for place, case in enumerate(cases_of(theme))
}
"""The theme of every case, and the numbers of ranks on which it runs."""
PER_WORKER_CASES = cases_of("per_worker")
REFUSED_THEMES = ("refused", "sums")
REFUSED_CASES = {case: theme for theme in REFUSED_THEMES for case in cases_of(theme)}
"""The theme of every case."""


@dataclass(frozen=True)
class Compared:
    """What one process and each of ``size`` ranks have found in a case."""

    size: int
    one: Values
    ranks: list[Values]


@dataclass(frozen=True)
class Outcomes:
    folder: Path
    jobs: Mapping[str, Ranks]

    def of(self, case: str) -> list[Compared]:
        if case in CASES:
            return [self._compared(case, "cases-1", "cases", n) for n in CASES[case][1]]
        return [
            self._compared(case, f"per_worker-1-{n}", "per_worker", n) for n in SIZES
        ]

    def refused(self, case: str) -> list[Values]:
        job = f"{REFUSED_CASES[case]}-2"
        return [self._values(job, rank, case) for rank in range(2)]

    def digits(self) -> Compared:
        ranks = [self._values("digits-3", rank, "") for rank in range(3)]
        return Compared(3, self._values("digits-1", 0, ""), ranks)

    def _compared(self, case: str, alone: str, job: str, size: int) -> Compared:
        ranks = [self._values(f"{job}-{size}", rank, case) for rank in range(size)]
        return Compared(size, self._values(alone, 0, case), ranks)

    def _values(self, job: str, rank: int, case: str) -> Values:
        values = np.load(self.folder / f"{job}-{rank}.npz")
        if not case:
            return dict(values)
        start = f"{case}/"
        found = {k[len(start) :]: values[k] for k in values if k.startswith(start)}
        assert found, f"there is no case {case} in {job}"
        if "error" in found:
            raise AssertionError(str(found["error"]))
        return found


def run_all(folder: Path) -> Outcomes:
    """Everything, in one start of the interpreter. Raises where a rank fails."""
    jobs = [_job(folder, "cases-1", 1, "cases/all.py")]
    for size in SIZES:
        chosen = tuple(case for case, (_, sizes) in CASES.items() if size in sizes)
        jobs.append(_job(folder, f"cases-{size}", size, "cases/all.py", chosen))
        parts = {"PARTS": str(size)}
        name = f"per_worker-1-{size}"
        jobs.append(_job(folder, name, 1, "cases/per_worker.py", (), parts))
        name = f"per_worker-{size}"
        parts |= PER_WORKER
        jobs.append(_job(folder, name, size, "cases/per_worker.py", (), parts))
    for theme in REFUSED_THEMES:
        jobs.append(_job(folder, f"{theme}-2", 2, f"cases/{theme}.py"))
    digits = (str(ROOT / "examples" / "digits.py"), "--epochs", "3")
    for size in (1, 3):
        jobs.append(_job(folder, f"digits-{size}", size, "final_weights.py", digits))
    found = run_jobs(folder, jobs, timeout_s=LIMIT_S)
    for ranks in found.values():
        assert set(ranks.exit_codes) == {0}, ranks.outputs
    return Outcomes(folder, found)


def _job(
    folder: Path,
    name: str,
    size: int,
    script: str,
    args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Job:
    return Job(name, size, script, (str(folder / name), *args), env or {})

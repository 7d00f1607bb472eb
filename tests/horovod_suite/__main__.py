"""Runs Horovod's tests on two ranks, file by file, and prints a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tests import horovod_suite

ROOT = Path(__file__).resolve().parents[2]

NOT_RUN = {
    "mxnet": "MXNet",
    "torch": "PyTorch",
    "test_timeline": "PyTorch",
    "test_keras.py": "TensorFlow 1 only",
    "test_compute_worker": "needs horovod.tensorflow.data, which tfcluster lacks",
}
"""Why files are not run, by parts of their names."""

Line: TypeAlias = tuple[str, str, bool, str]
"""What a rank reports: test, outcome, whether it is of a subtest, reason."""

Outcomes: TypeAlias = dict[str, tuple[str, str]]
"""Outcome and reason, by test."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.horovod_suite", description=horovod_suite.__doc__
    )
    parser.add_argument("folder", type=Path, help="Horovod, or its folder test")
    parser.add_argument("--only", metavar="FILE", nargs="+", help="names of files")
    parser.add_argument("-k", default="", help="as pytest's option: which tests")
    parser.add_argument("-n", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument(
        "--timeout", type=int, default=600, help="seconds for a test (default: 600)"
    )
    given = parser.parse_args(words)
    files = files_in(given.folder)
    if not files:
        parser.error(f"no file parallel/test_*.py in {given.folder}")
    found: dict[str, Outcomes] = {}
    for file in files:
        if why_not_run(file.name) or (given.only and file.name not in given.only):
            continue
        options = [f"--timeout={given.timeout}", "-k", given.k]
        found[file.name] = run(file, given.n, options)
        print_lines(row(file.name, found[file.name]))
    print_lines(*summary(found, [] if given.only else [each.name for each in files]))
    all_found = [outcome for tests in found.values() for outcome, _ in tests.values()]
    return int("failed" in all_found or "passed" not in all_found)


def files_in(folder: Path) -> list[Path]:
    """The tests that run in several processes."""
    parts = [folder / "test" / "parallel", folder / "parallel", folder]
    return sorted(next((p for p in parts if p.is_dir()), folder).glob("test_*.py"))


def run(file: Path, ranks: int, options: Sequence[str]) -> Outcomes:
    """Run a file under ``tfcluster launch``; what it prints goes to stderr."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="horovod-suite-") as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "tfcluster", "launch", "-n", str(ranks)),
                *("--set", "runtime.require_exchange=false", "--"),
                *(sys.executable, str(ROOT / "tests/horovod_suite/rank.py"), folder),
                *(*options, str(file.resolve())),
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=sys.stderr,
            check=False,
        )
        reports = sorted(Path(folder).glob("rank-*.jsonl"))
        lines = [
            tuple(json.loads(line))
            for report in reports
            for line in report.read_text(encoding="utf-8").splitlines()
        ]
    return outcomes(lines, complete=len(reports) == ranks)


def outcomes(lines: Iterable[Line], *, complete: bool = True) -> Outcomes:
    """One outcome for each test, from those of its subtests on all ranks.

    It has passed if no part has failed, and not all of its parts were skipped.
    """
    parts = defaultdict(list)
    for name, outcome, is_part, why in lines:
        parts[name].append((outcome, is_part, why))
    found: Outcomes = {} if complete else {"(ranks)": ("failed", "a rank did not run")}
    for name, seen in parts.items():
        by_subtest = any(is_part for _, is_part, _ in seen)
        counted = [
            (o, why) for o, part, why in seen if o == "failed" or part or not by_subtest
        ]
        for outcome in ("failed", "passed", "skipped"):
            reasons = [why for each, why in counted if each == outcome]
            if reasons:
                found[name] = (outcome, reasons[0])
                break
    # TensorFlow's own class of tests has it.
    found.pop("test_session", None)
    return found


def why_not_run(file: str) -> str | None:
    """The reason why a file is not run, if it is not."""
    return next((why for part, why in NOT_RUN.items() if part in file), None)


def row(file: str, tests: Outcomes) -> str:
    """A line of the table."""
    count = Counter(outcome for outcome, _ in tests.values())
    cells = (file, *(count[each] for each in ("passed", "failed", "skipped")))
    return f"| {' | '.join(map(str, cells))} |"


def summary(found: Mapping[str, Outcomes], files: Iterable[str]) -> list[str]:
    """The table, the failures, and why tests and files were left out."""
    total: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    lines = ["", "| file | passed | failed | skipped |", "| --- | --- | --- | --- |"]
    failures = []
    for file, tests in found.items():
        lines.append(row(file, tests))
        for name, (outcome, why) in tests.items():
            total[outcome] += 1
            if outcome == "skipped":
                skipped[why] += 1
            elif outcome == "failed":
                failures.append(f"failed: {file}::{name}: {why}")
    cells = [str(total[each]) for each in ("passed", "failed", "skipped")]
    lines += [f"| all | {' | '.join(cells)} |", "", *failures]
    lines += [f"skipped: {n} tests: {why}" for why, n in skipped.most_common()]
    reasons = [(file, why_not_run(file)) for file in files]
    return lines + [f"not run: {file}: {why}" for file, why in reasons if why]


def print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

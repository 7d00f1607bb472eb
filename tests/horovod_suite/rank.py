"""Runs test files by pytest in one rank; writes outcomes into a folder.

Usage: ``python -m tests.horovod_suite.rank FOLDER ARGUMENT-OF-PYTEST...``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TextIO

import horovod.tensorflow as hvd
import pytest

from tests.horovod_suite import adaptations

OPTIONS = ("-p", "no:cacheprovider", "-q", "--tb=short", "-c", os.devnull)


class Outcomes:
    """A plugin of pytest: writes a line for each outcome as soon as it is known."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_part = isinstance(report, pytest.SubtestReport)
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            self._write(name, report.outcome, is_part, _reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self._write("(import)", report.outcome, False, _reason(report))

    def _write(self, name: str, outcome: str, is_part: bool, why: str) -> None:
        self._file.write(json.dumps([name, outcome, is_part, why]) + "\n")
        self._file.flush()


def main(folder: str, arguments: list[str]) -> None:
    os.environ["HOROVOD_RANK"] = str(hvd.rank())
    os.environ["HOROVOD_SIZE"] = str(hvd.size())
    adaptations.install()
    with Path(folder, f"rank-{hvd.rank()}.jsonl").open("w", encoding="utf-8") as file:
        pytest.main(
            [*OPTIONS, *arguments],
            plugins=[Outcomes(file)],
        )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    found = report.longrepr
    if isinstance(found, tuple):
        return found[2].removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)
    return str(crash.message if crash else found or "").strip().partition("\n")[0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""The driver of Horovod's tests: outcomes, and what it prints about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.horovod_suite.__main__ import (
    Line,
    files_in,
    outcomes,
    summary,
)

FILE = "test_tensorflow.py"


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([("a", "passed", False, "")] * 2, ("passed", "")),
        ([("a", "skipped", False, "no GPU")] * 2, ("skipped", "no GPU")),
        # One rank suffices.
        ([("a", "passed", False, ""), ("a", "failed", False, "E")], ("failed", "E")),
        # A test with skipped subtests only counts as skipped, although it passes.
        (
            [("a", "skipped", True, "no GPU")] * 2 + [("a", "passed", False, "")],
            ("skipped", "no GPU"),
        ),
        (
            [("a", "skipped", True, "graph"), ("a", "passed", True, "")],
            ("passed", ""),
        ),
        # Its end, after subtests that passed.
        (
            [("a", "passed", True, ""), ("a", "failed", False, "E")],
            ("failed", "E"),
        ),
    ],
)
def test_outcomes_of_subtests_and_ranks(
    lines: list[Line], outcome: tuple[str, str]
) -> None:
    assert outcomes(lines) == {"a": outcome}


def test_a_rank_that_reports_nothing_is_a_failure() -> None:
    found = outcomes([("a", "passed", False, "")], complete=False)
    assert [outcome for outcome, _ in found.values()] == ["failed", "passed"]


def test_the_summary() -> None:
    found = {
        FILE: {
            "test_a": ("passed", ""),
            "test_b": ("failed", "AssertionError: 1"),
            "test_c": ("skipped", "no GPU"),
        }
    }
    assert summary(found, [FILE, "test_mxnet1.py"])[3:] == [
        f"| {FILE} | 1 | 1 | 1 |",
        "| all | 1 | 1 | 1 |",
        "",
        f"failed: {FILE}::test_b: AssertionError: 1",
        "skipped: 1 tests: no GPU",
        "not run: test_mxnet1.py: MXNet",
    ]


@pytest.mark.parametrize("given", [".", "test", "test/parallel"])
def test_the_folder_may_be_horovods_or_one_below(tmp_path: Path, given: str) -> None:
    folder = tmp_path / "test" / "parallel"
    folder.mkdir(parents=True)
    (folder / FILE).touch()
    (folder / "base_test_tensorflow.py").touch()
    assert files_in(tmp_path / given) == [folder / FILE]

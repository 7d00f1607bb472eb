"""The table of peers: its cells, and one launch that fills some of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import contenders, peers
from benchmarks.contenders import Layout, Outcome, Result
from tfcluster.base.isolated_import import PACKAGE_ROOT

ONE = Result(step_s=0.2, first_s=3.0, memory_mib=500.0, cores=1, parameters=10)


def test_places_name_the_first_peer_and_how_far_others_are_behind() -> None:
    outcomes: dict[str, Outcome] = {
        "tfcluster": replace(ONE, step_s=0.1),
        "ddp": ONE,
        "jax": "ValueError: no",
    }
    expected = {"tfcluster": "**first**", "ddp": "2.00 times tfcluster"}
    assert peers.places(outcomes) == expected


def test_efficiency_counts_the_cores_in_use_and_not_the_ranks() -> None:
    assert replace(ONE, step_s=0.1, cores=2).efficiency(ONE) == pytest.approx(1.0)
    assert Layout(4).cores(2) == 2
    assert Layout(4).cores(64) == 64


@pytest.mark.parametrize(
    ("layout", "cores", "threads"),
    [
        (Layout(1), 8, 1),
        (Layout(1, is_whole=True), 8, 8),
        (Layout(4), 8, 2),
        (Layout(4), 2, 1),
        (Layout(2, 1.0), 8, 4),
    ],
)
def test_ranks_divide_the_cores(layout: Layout, cores: int, threads: int) -> None:
    assert set(layout.variables(cores).values()) == {str(threads)}


def test_a_failed_peer_has_the_first_line_of_its_error_in_its_row() -> None:
    output = "Traceback ...\n  File x\nValueError: a | b\nE0000 further lines\n"
    assert contenders.error_in(["", output]) == "ValueError: a / b"
    assert contenders.error_in(["", "Killed\n"]) == "failed: Killed"
    assert contenders.error_in([""]) == "failed: no output"


def test_reports_are_those_of_all_ranks_among_other_lines() -> None:
    output = 'note\n[worker:1] TIMES {"step": 2}\nTIMES {"step": 1}\n'
    assert [report["step"] for report in contenders.reports_in(output)] == [2, 1]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_quick_table_has_a_result_in_each_cell() -> None:
    words = "--quick --models lstm --ranks 2 --hosts --peers tfcluster keras"
    done = subprocess.run(
        (sys.executable, "-m", "benchmarks.peers", *words.split()),
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
        timeout=230,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("| Embed")]
    assert len(lines) == 2
    assert all(line.count(" ms |") == 1 for line in lines), done.stdout
    assert sum("**first**" in line for line in lines) == 1
    assert "of 1 places" in done.stdout

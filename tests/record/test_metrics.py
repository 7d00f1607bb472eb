"""Tests of the metrics of a run: bounded, evenly spread, and read after any fault."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tfcluster.record import metrics
from tfcluster.record.metrics import (
    MetricsWriter,
    metrics_of,
    most_of_series,
    read_metrics,
)
from tfcluster.record.paths import RunPaths


def line(number: int, type_: str = "sample", task: str = "worker:0") -> dict[str, Any]:
    return {"t": float(number), "type": type_, "task": task, "step": number}


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_an_arbitrarily_long_run_keeps_few_lines_spread_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_MOST_WAITING", 2000)
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths, most=40)
    for second in range(2000):
        writer.sample(float(second), {"worker:0": {"step": second}})
    writer.close(10)
    found = steps(paths.metrics)
    assert 40 <= len(found) <= 40 * (1 + math.log(2000 / 40))
    assert found[:40] == list(range(40))
    assert found[-1] == 1999
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) <= 2000 / 40 + 1


def test_the_last_line_of_each_series_is_not_lost(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths, most=100)
    for tenth in range(25):
        writer.sample(tenth / 10, {"worker:0": {"step": tenth}})
    for number in range(3):
        writer.add({**line(number, "epoch"), "t": 5 + number / 1000})
    writer.close(10)
    assert steps(paths.metrics) == [0, 9, 18, 0, 1, 2, 24]


def test_a_task_that_changes_no_more_is_written_no_more(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths, most=100)
    writer.sample(0.0, {"worker:0": {"step": 1}, "worker:1": {"step": 1}})
    writer.sample(5.0, {"worker:0": {"step": 1}, "worker:1": {"step": 2}})
    writer.close(10)
    samples = read_metrics(paths).samples
    assert [(sample.task, sample.step) for sample in samples] == [
        ("worker:0", 1),
        ("worker:1", 1),
        ("worker:1", 2),
    ]


def test_a_torn_line_is_skipped_and_continued_after(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.metrics.write_bytes(json.dumps(line(1)).encode() + b'\n{"t":2,"type":"samp')
    assert [each.step for each in read_metrics(paths).samples] == [1]
    writer = MetricsWriter(paths, most=100)
    writer.sample(3.0, {"worker:0": {"step": 3}})
    writer.close(10)
    assert [each.step for each in read_metrics(paths).samples] == [1, 3]


def test_what_cannot_be_written_is_lost_and_nothing_else(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "gone")
    writer = MetricsWriter(paths, most=100)
    writer.sample(0.0, {"worker:0": {"step": 0}})
    writer.close(10)
    paths.root.mkdir()
    writer = MetricsWriter(paths, most=100)
    writer.sample(2.0, {"worker:0": {"step": 2}})
    writer.close(10)
    assert steps(paths.metrics) == [2]


def test_a_line_that_cannot_be_encoded_is_lost_and_nothing_else(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths, most=100)
    endless: list[Any] = []
    endless.append(endless)
    writer.add({**line(0), "value": endless})
    writer.add(line(1))
    writer.close(timeout_s=10)
    assert steps(paths.metrics) == [1]


def test_the_file_is_bounded_whatever_the_number_of_tasks() -> None:
    assert most_of_series(1) == 1000
    assert most_of_series(100) == 100
    assert most_of_series(10_000) == 50


def test_everything_in_a_line_is_read() -> None:
    found = metrics_of(
        [
            {
                "t": 5.5,
                "type": "sample",
                "task": "worker:0",
                "attempt": 1,
                "step": 7,
                "steps_per_s": 2.5,
                "bytes": 70,
                "epoch": 2,
                "metrics": {"loss": 0.25, "accuracy": None},
                "rss_bytes": 1000,
                "cpu_s": 3.5,
                "gpus": [{"gpu": 1, "busy": 0.5, "memory_bytes": 9}],
            },
            {"t": 6, "type": "epoch", "task": "worker:0", "epoch": 2, "metrics": {}},
            {
                "t": 7,
                "type": "exchanges",
                "task": "worker:0",
                "totals": [{"what": "g", "count": 3, "seconds": 0.5, "bytes": 30}],
            },
        ]
    )
    (sample,), (epoch,) = found.samples, found.epochs
    assert (sample.t, sample.attempt, sample.step, sample.epoch) == (5.5, 1, 7, 2)
    assert (sample.steps_per_s, sample.exchanged_bytes) == (2.5, 70)
    assert sample.metrics == {"loss": 0.25, "accuracy": None}
    assert (sample.rss_bytes, sample.cpu_s) == (1000, 3.5)
    assert (sample.gpus[0].gpu, sample.gpus[0].busy) == (1, 0.5)
    assert (epoch.epoch, epoch.metrics) == (2, {})
    (total,) = found.exchanges["worker:0"]
    assert (total.what, total.count, total.seconds, total.bytes) == ("g", 3, 0.5, 30)


@pytest.mark.parametrize(
    "value",
    [None, True, "x", [], {}, [None], [[{}]], {"loss": {}}, float("inf"), 10**400],
    ids=lambda value: str(value)[:9],
)
def test_lines_that_make_no_sense_are_harmless(value: object) -> None:
    whole: dict[str, Any] = {"t": 1.0, "task": "worker:0", "epoch": 1}
    keys = ("t", "task", "type", "metrics", "gpus", "totals", "epoch", "step", "cpu_s")
    for type_ in ("sample", "epoch", "exchanges"):
        for key in keys:
            found = metrics_of([{**whole, "type": type_, key: value}])
            assert all(each.step is None for each in found.samples)

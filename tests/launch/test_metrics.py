"""Tests of the metrics that a run leaves in its record."""

from __future__ import annotations

import os

from tests.kit.cluster import Cluster
from tests.launch.test_progress import REPORT_STEPS
from tfcluster.protocol.task_events import ExchangeTotal
from tfcluster.record.metrics import read_metrics
from tfcluster.record.paths import RunPaths

TRAIN = """
tell_step(4, 700, position=[1, 3, 4, 9, {'loss': 0.5}])
tell(type='epoch', epoch=1, step=None, metrics={'loss': 0.25, 'val_loss': None})
tell(type='epoch', epoch='one')
tell(type='exchanges', totals=[['g', 2, 0.5, 5]])
tell(type='exchanges', totals=None)
tell(type='versions', versions={'Keras': '3'})
tell(type='versions', versions={'Keras': None})
"""


def test_what_tasks_report_is_in_the_metrics(cluster: Cluster) -> None:
    running = cluster.python(REPORT_STEPS + TRAIN, count=2)
    assert running.end() == 0
    found = read_metrics(RunPaths(running.folder))
    last = {each.task: each for each in found.samples}
    assert sorted(last) == ["worker:0", "worker:1"]
    sample = last["worker:1"]
    assert (sample.step, sample.steps_per_s, sample.wait_share) == (4, 20.5, 0.25)
    assert (sample.exchanged_bytes, sample.epoch) == (700, 1)
    assert sample.metrics == {"loss": 0.25, "val_loss": None}
    (epoch,) = (each for each in found.epochs if each.task == "worker:1")
    assert (epoch.step, epoch.epoch) == (4, 1)
    assert epoch.metrics == {"loss": 0.25, "val_loss": None}
    total = ExchangeTotal("g", 2, 0.5, 5)
    assert found.exchanges == {"worker:0": (total,), "worker:1": (total,)}
    wrong = "it reports what is not valid: 'epoch' frame: 'epoch' must be int"
    assert wrong in running.err
    (told,) = running.found("versions", task="worker:0")
    assert told["versions"] == {"Keras": "3"}
    (machine,) = running.found("machine", host="localhost")
    assert machine["cpus"] == len(os.sched_getaffinity(0))
    assert (running.folder / "metrics.ndjson").stat().st_mode & 0o777 == 0o600


def test_a_plain_command_has_memory_and_cpu_time(cluster: Cluster) -> None:
    code = "sum(range(4_000_000)); memory = bytearray(b'x') * (30 << 20)"
    running = cluster.python(code)
    assert running.end() == 0
    *_, last = read_metrics(RunPaths(running.folder)).samples
    assert last.cpu_s is not None
    assert last.cpu_s > 0.02
    assert last.max_rss_bytes is not None
    assert last.max_rss_bytes > 30 << 20
    assert last.step is None

"""More ranks than rows in a batch: people see the loss of one machine."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.kit.cluster import Cluster
from tests.kit.time_limits import allow_s
from tfcluster.record.metrics import read_metrics
from tfcluster.record.paths import RunPaths

PROGRAM = """
import keras, numpy as np
keras.utils.set_random_seed(4)
x = np.random.normal(size=(40, 8)).astype("float32")
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, :1] * 2, batch_size=2, epochs=1)
"""
LOSS = re.compile(r"20/20.*loss: ([0-9.]+)")


@pytest.mark.slow
def test_the_progress_of_batches_with_fewer_rows_than_ranks(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(PROGRAM)
    alone = subprocess.run(
        [sys.executable, "train.py"],
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    running = cluster.start("-n", "3", "--", "python", "train.py")
    assert running.end(allow_s(120.0)) == 0, running.err
    expected = float(LOSS.findall(alone.stdout)[-1])
    assert expected > 0
    shown = float(LOSS.findall(running.out)[-1])
    recorded = [
        epoch.metrics["loss"] for epoch in read_metrics(RunPaths(running.folder)).epochs
    ]
    assert len(recorded) == 3
    for loss in (shown, *recorded):
        assert loss is not None
        assert abs(loss - expected) < 1e-4 * expected

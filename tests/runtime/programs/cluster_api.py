# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""The features that RETURNN's page on distributed TensorFlow names: RESULTS CASE...

Prints nothing of interest; each rank writes RESULTS-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))


def case_forms():
    """One cluster converted to all forms and back."""
    import tensorflow as tf

    import tfcluster.runtime as tfc
    from tfcluster.runtime.tf1.cluster_formats import jobs_of

    spec = tf.train.ClusterSpec(json.loads(os.environ["CLUSTER"]))
    server = tf.train.ServerDef(
        cluster=spec.as_cluster_def(), job_name="worker", task_index=1
    )
    forms = {
        "ClusterSpec": spec,
        "ClusterDef": spec.as_cluster_def(),
        "dict": spec.as_dict(),
        "ServerDef": server,
    }
    return {
        name: [
            jobs_of(form),
            tfc.cluster_spec(form).as_dict(),
            tfc.cluster_spec(form) == spec,
        ]
        for name, form in forms.items()
    }


def case_resolver():
    """What TensorFlow reads from TF_CONFIG, and what the runtime reads."""
    import tensorflow as tf

    from tfcluster.runtime.context import context_from

    found = []
    for config in json.loads(os.environ["CONFIGS"]):
        os.environ["TF_CONFIG"] = json.dumps(config)
        theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        ours = context_from({"TF_CONFIG": os.environ["TF_CONFIG"]})
        jobs = theirs.cluster_spec().as_dict()
        found.append(
            [
                [theirs.task_type, theirs.task_id, jobs],
                [ours.task_type, ours.task_index, dict(ours.cluster)],
            ]
        )
    del os.environ["TF_CONFIG"]
    return found


KEPT: list[Any] = []
"""Servers that must not be stopped, because they might wait for each other. They end
with the process."""


def case_service():
    """First come, first served, with each element once; then coordinated reads."""
    import tensorflow as tf

    from tfcluster.runtime.data_service.client import DataServiceClient

    service = tf.data.experimental.service
    config = service.DispatcherConfig(work_dir="journal", fault_tolerant_mode=True)
    dispatcher = service.DispatchServer(config)
    address = dispatcher.target.partition("://")[2]
    config = service.WorkerConfig(dispatcher_address=address)
    workers = [service.WorkerServer(config) for _ in range(2)]
    KEPT.extend([dispatcher, *workers])
    parts = {}

    def consume(rank, in_step):
        client = DataServiceClient(
            f"grpc://{address}", len(workers), "run", rank, 3, in_step
        )
        elements = tf.data.Dataset.range(60)
        job = "in step" if in_step else "in turn"
        parts[rank] = [int(x) for x in client.distributed(elements, job, 60)]

    found = {}
    for in_step in (False, True):
        threads = [
            threading.Thread(target=consume, args=(rank, in_step)) for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        found["in step" if in_step else "in turn"] = [parts[i] for i in range(3)]
    return found


def keeping(model, seen):
    """Make ``model`` record the rows that it trains on."""
    import tensorflow as tf

    step = model.train_step

    def keep(x):
        seen.append(x[:, 0].tolist())
        return []

    def train_step(data):
        tf.numpy_function(keep, [data[0]], [])
        return step(data)

    model.train_step = train_step
    return model


def case_fit():
    """A rank's rows and weights, and the files that it writes to its working folder."""
    Path(f"rank-{RANK}").mkdir(exist_ok=True)
    os.chdir(f"rank-{RANK}")
    import keras
    import numpy as np

    keras.utils.set_random_seed(4)
    split = np.random.permutation(5).tolist()
    x = np.arange(24, dtype="float32").reshape(-1, 1)
    seen: list[list[float]] = []
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    keeping(model, seen)
    model.fit(
        x,
        x * 2,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint("best.keras", monitor="loss"),
            keras.callbacks.CSVLogger("log.csv"),
            keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False),
        ],
    )
    model.save_weights("end.weights.h5")
    return {
        "seen": seen,
        "split": split,
        "weights": [w.tolist() for w in model.get_weights()],
        "files": sorted(str(p) for p in Path().rglob("*") if p.is_file()),
    }


if __name__ == "__main__":
    path, *cases = sys.argv[1:]
    found = {name: globals()[f"case_{name}"]() for name in cases}
    Path(f"{path}-{RANK}.json").write_text(json.dumps(found))

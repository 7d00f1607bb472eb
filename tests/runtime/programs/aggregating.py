# As people write scripts: without types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Sums over eight CPU devices of one process: results as JSON on the last line."""

import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.exchange import replica_gradients

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 8
)
found: dict[str, Any] = {"hierarchical": {}, "nccl": {}, "check": []}


def replicas_of(devices, gradients=5):
    draw = tf.random.Generator.from_seed(len(devices))
    found = []
    for device in devices:
        with tf.device(device):
            found.append(
                [(draw.normal([3, 2]), f"v{number}") for number in range(gradients)]
            )
    return found


def check_sums(devices, replicas, sums):
    for device, row in zip(devices, sums, strict=True):
        for number, (gradient, variable) in enumerate(row):
            expected = np.sum([r[number][0].numpy() for r in replicas], axis=0)
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
            assert variable == f"v{number}"
            assert gradient.device.endswith(device), (gradient.device, device)


for count in (1, 2, 3, 4, 5, 8):
    devices = [f"/device:CPU:{number}" for number in range(count)]
    replicas = replicas_of(devices)
    for name, act in (
        ("hierarchical", replica_gradients.aggregate_hierarchically),
        ("nccl", replica_gradients.aggregate_by_nccl),
    ):
        check_sums(devices, replicas, act(devices, replicas))
        found[name][count] = "ok"

devices = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
graph = tf.function(
    lambda *gradients: [
        [gradient for gradient, _ in row]
        for row in replica_gradients.aggregate_hierarchically(
            devices, [[(gradient, "v")] for gradient in gradients]
        )
    ],
    autograph=False,
)
found["graph"] = [
    float(row[0]) for row in graph(tf.constant(1.0), tf.constant(2.0), tf.constant(4.0))
]
try:
    replica_gradients.aggregate_hierarchically(devices, replicas_of(devices[:2]))
except ValueError as error:
    found["uneven"] = str(error)

NAN, INF = float("nan"), float("inf")
for values in ([1.0, 2.0], [1.0, NAN], [INF, 1.0], [-INF, INF], [3.0]):
    pairs = [(tf.constant([value, 1.0]), f"v{i}") for i, value in enumerate(values)]
    (mean, variable), bad = replica_gradients.aggregate_gradient(
        pairs, mean=True, check=True
    )
    (plain, _), nothing = replica_gradients.aggregate_gradient(pairs)
    found["check"].append([str(float(mean[0])), str(float(plain[0])), bool(bad)])
    assert variable == "v0"
    assert nothing is None


def slices(values, indices):
    return tf.IndexedSlices(
        tf.constant(values), tf.constant(indices), tf.constant([4, 1])
    )


one, other = slices([[1.0], [2.0]], [0, 2]), slices([[4.0]], [2])
dense = tf.reshape(tf.range(4.0), [4, 1])


def whole(value):
    return tf.convert_to_tensor(value).numpy().ravel().tolist()


both = replica_gradients.total([one, other])
found["sparse"] = [replica_gradients.is_sparse(both), whole(both)]
mixed = replica_gradients.total([one, dense])
found["mixed"] = [replica_gradients.is_sparse(mixed), whole(mixed)]
found["single"] = replica_gradients.total([one]) is one
found["divided"] = [
    whole(replica_gradients.divided(both, 2)),
    whole(replica_gradients.divided(dense, 2)),
]
moved = replica_gradients.copied(one, "/device:CPU:3")
found["moved"] = [moved.values.device[-5:], moved.indices.device[-5:], whole(moved)]
found["moved dense"] = replica_gradients.copied(dense, "/device:CPU:3").device[-5:]
_, bad = replica_gradients.aggregate_gradient(
    [(one, "v"), (slices([[NAN]], [1]), "v")], check=True
)
found["bad slices"] = bool(bad)
try:
    replica_gradients.total([])
except ValueError as error:
    found["nothing"] = str(error)
found["gpus"] = len(tf.config.list_logical_devices("GPU"))
print(json.dumps(found))

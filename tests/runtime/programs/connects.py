# Written like user scripts: without type annotations.
# mypy: allow-untyped-calls
"""Computes on a ps in eager code, as programs of TensorFlow 2 can without Keras."""

from __future__ import annotations

import json
import os

import tensorflow as tf

cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
spec = tf.train.ClusterSpec({"ps": cluster["ps"]})
tf.config.experimental_connect_to_cluster(spec, job_name="driver")
with tf.device("/job:ps/task:0"):
    found = tf.constant(2.0) * 3.0
print("FOUND", json.dumps({"device": found.device, "value": float(found)}))

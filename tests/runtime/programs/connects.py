# Written like user scripts: without type annotations.
# mypy: allow-untyped-calls, allow-untyped-defs
"""Computes on a ps, in eager code or in a session; the argument chooses."""

from __future__ import annotations

import json
import os
import sys

import tensorflow as tf

cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]


def eagerly():
    spec = tf.train.ClusterSpec({"ps": cluster["ps"]})
    tf.config.experimental_connect_to_cluster(spec, job_name="driver")
    with tf.device("/job:ps/task:0"):
        return tf.constant(2.0) * 3.0


def in_a_session():
    """Its master is the ps itself."""
    master = f"grpc://{cluster['ps'][0]}"
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps"])
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
        product = tf.constant(2.0) * 3.0
        with tf.compat.v1.Session(master, config=config) as session:
            return session.run(product)


found = {"eager": eagerly, "session": in_a_session}[sys.argv[1]]()
print("FOUND", json.dumps({"value": float(found)}))

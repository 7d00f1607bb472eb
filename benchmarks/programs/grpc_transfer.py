"""Sends a tensor to a ps and back over TensorFlow's gRPC; prints the median seconds.

``argv[1]``: the number of the tensor's elements. Started by ``tfcluster launch`` with
``strategy: none``, one worker and one ps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import tensorflow as tf

REPEATS, WARM = 30, 5

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
address = resolver.cluster_spec().task_address("ps", 0)
tf.config.experimental_connect_to_host(address, "ps")
with tf.device("CPU:0"):
    tensor = tf.ones([int(sys.argv[1])])
times = []
for _ in range(WARM + REPEATS):
    begin = time.perf_counter()
    with tf.device("/job:ps/task:0/device:CPU:0"):
        there = tf.identity(tensor)
    with tf.device("/job:localhost/task:0/device:CPU:0"):
        back = tf.identity(there)
    memoryview(back)[0]
    times.append(time.perf_counter() - begin)
print("TIMES", json.dumps({"push": statistics.median(times[WARM:])}), flush=True)
os._exit(0)

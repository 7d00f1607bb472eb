"""A tf.compat.v1 program with between-graph replication and a server per task."""

import json
import os

import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_v2_behavior()

config = json.loads(os.environ["TF_CONFIG"])
cluster = tf1.train.ClusterSpec(config["cluster"])
task = f"/job:{config['task']['type']}/task:{config['task']['index']}"
server = tf1.train.Server(
    cluster, job_name=config["task"]["type"], task_index=config["task"]["index"]
)
with tf1.device(tf1.train.replica_device_setter(cluster=cluster, worker_device=task)):
    counter = tf1.get_variable("counter", initializer=0)
    count = tf1.assign_add(counter, 1, use_locking=True)

options = tf1.ConfigProto(device_filters=["/job:ps", task])
with tf1.Session(server.target, config=options) as session:
    session.run(counter.initializer)
    print("counted", [int(session.run(count)) for _ in range(3)], counter.device)
os._exit(0)

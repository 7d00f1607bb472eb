"""Reads a dataset that the run's tf.data service produces."""

import os

import tensorflow as tf

dataset = tf.data.Dataset.range(20).map(lambda x: x * x)
dataset = dataset.apply(
    tf.data.experimental.service.distribute(
        processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
        service=os.environ["TFCLUSTER_DATA_SERVICE"],
        job_name="squares",
    )
)
print("sum", sum(int(x) for x in dataset))

"""A worker that exits after its first all-reduce with TensorFlow's own strategy."""

import json
import os

if "OMPI_COMM_WORLD_RANK" in os.environ and "TF_CONFIG" not in os.environ:
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{x}"]) for x in ("RANK", "SIZE"))
    base = int(os.environ["BENCH_PORT"])
    workers = [f"127.0.0.1:{base + i}" for i in range(size)]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def sum_of_ones() -> object:
    def replica() -> object:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1.0))

    return strategy.run(replica)


total = tf.function(sum_of_ones)
assert float(strategy.experimental_local_results(total())[0]) == float(
    strategy.num_replicas_in_sync
)
# The strategy's threads may hang at interpreter exit if peers have already left.
os._exit(0)

"""Shards of a batch: ranks of the partition, of which a process has one or several.

TensorFlow must compute the same bits in every process that has some.
"""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.shard_sums import shard_bounds
from tfcluster.runtime.partition.placement import Ranks

_AS_WRITTEN = "disable_meta_optimizer"
"""The option that switches off TensorFlow's optimizer of graphs."""


def ranks_of(shards: int, rank: int, size: int) -> Ranks:
    """The shards of process ``rank`` of ``size``; see ``compute_alike``."""
    return Ranks(shards, tuple(range(*shard_bounds(shards, rank, size))), ordered=True)


def compute_alike(shards: int, size: int) -> None:
    """Let TensorFlow compute bits that do not depend on the number of processes.

    It uses one thread for each operation, because the bits of its products depend on
    the number of threads, and only deterministic operations. Call it before TensorFlow
    computes anything. Raises CollectiveError if there are more processes than shards,
    or TensorFlow is in use.
    """
    if size > shards:
        raise CollectiveError(
            f"runtime.shards is {shards}, and there are {size} ranks: "
            "a rank needs at least one shard. Use fewer ranks, or more shards"
        )
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    except RuntimeError as error:
        raise CollectiveError(
            "runtime.shards needs one thread for each operation, but the program has "
            "used TensorFlow before it imports Keras. Import Keras first"
        ) from error
    tf.config.experimental.enable_op_determinism()
    # How it rewrites a shard's operations depends on the other shards in the graph.
    tf.config.optimizer.set_experimental_options({_AS_WRITTEN: True})


def require_alike() -> None:
    """Raise CollectiveError if the program has undone ``compute_alike``."""
    if not tf.config.optimizer.get_experimental_options().get(_AS_WRITTEN):
        raise CollectiveError(
            "runtime.shards needs graphs that run as they are written, but the program "
            "has switched TensorFlow's graph optimizer on. Remove "
            f"{_AS_WRITTEN} from tf.config.optimizer.set_experimental_options"
        )
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if threads != 1:
        raise CollectiveError(
            "runtime.shards needs one thread for each operation, because TensorFlow's "
            f"results depend on their number; the program has set {threads}. Remove "
            "tf.config.threading.set_intra_op_parallelism_threads. Several operations "
            "still run at a time"
        )

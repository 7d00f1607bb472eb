"""Times all-reduces of TensorFlow tensors; started by ``tfcluster launch``."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import tfcluster.runtime as tfc
from benchmarks.programs.reduce_times import report


def act(count: int) -> Callable[[], None]:
    tensor = tf.fill([count], float(tfc.rank() + 1))
    expected = sum(range(1, tfc.size() + 1))
    total = tfc.allreduce(tensor, op=tfc.Sum)
    assert bool(tf.reduce_all(total == expected))

    def run() -> None:
        tfc.allreduce(tensor, op=tfc.Sum)

    return run


tfc.init()
report(tfc.rank(), act, tfc.barrier)

"""Times all-reduces of TensorFlow tensors; started by ``tfcluster launch``.

With ``graph`` as ``argv[2]``, each is a call of a ``tf.function`` with an all-reduce.
"""

from __future__ import annotations

import sys
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

    if "graph" not in sys.argv:
        return run

    @tf.function  # type: ignore[untyped-decorator] # TensorFlow has no types
    def graph(given: tf.Tensor) -> tf.Tensor:
        return tfc.allreduce(given, op=tfc.Sum)

    return lambda: graph(tensor)


tfc.init()
report(tfc.rank(), act, tfc.barrier)

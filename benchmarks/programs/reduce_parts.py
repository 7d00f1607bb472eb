"""Times the layers of an all-reduce and prints their times as JSON.

``argv[1]`` is a JSON list of sizes in bytes. Started by ``tfcluster launch``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from benchmarks.programs.reduce_times import repeats
from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.process_group import group


def seconds(size: int, act: Callable[[], object]) -> float:
    times = []
    for number in range(repeats(size) + 3):
        tfc.barrier()
        begin = time.perf_counter()
        act()
        if number >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def agree() -> None:
    with group().exchange(Signature("nothing")):
        pass


def parts(size: int) -> dict[str, float]:
    with group().exchange(Signature("the transport")) as call:
        transport = call.transport
    tensor = tf.fill([size // 4], float(tfc.rank() + 1))
    ours = np.full(size // 4, float(tfc.rank() + 1), np.float32)
    theirs, result = ours.copy(), ours.copy()
    signature = Signature("all-reduce of arrays")

    def copy_and_add() -> None:
        theirs[:] = ours
        np.add(ours, theirs, out=result)

    return {
        "a copy and an addition, alone": seconds(size, copy_and_add),
        "ranks meet (transport.allgather)": seconds(
            size, lambda: transport.allgather(b"")
        ),
        "ranks agree what they reduce (group.exchange)": seconds(size, agree),
        "the vector is reduced (transport.allreduce)": seconds(
            size, lambda: transport.allreduce(result, ReduceOp.SUM, ours)
        ),
        "both (operations.reduce_arrays)": seconds(
            size, lambda: reduce_arrays(group(), [ours], ReduceOp.SUM, signature)
        ),
        "tensor in, tensor out (tfc.allreduce)": seconds(
            size, lambda: tfc.allreduce(tensor, op=tfc.Sum)
        ),
    }


tfc.init()
found = {size: parts(size) for size in json.loads(sys.argv[1])}
if tfc.rank() == 0:
    print("TIMES", json.dumps(found), flush=True)

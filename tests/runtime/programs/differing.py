"""Ranks that call different operations, case by case; the last line is JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfcluster.runtime as tfc

RANK = tfc.rank()
ODD = tfc.size() - 1 == RANK


def either(usual: Callable[[], Any], odd: Callable[[], Any]) -> Callable[[], Any]:
    return odd if ODD else usual


CASES: dict[str, Callable[[], Any]] = {
    "shape": lambda: tfc.allreduce(tf.ones([3 if ODD else 2]), name="weights"),
    "dtype": lambda: tfc.allreduce(
        tf.ones([2], tf.float64 if ODD else tf.float32), name="weights"
    ),
    "reduction": lambda: tfc.allreduce(tf.ones([2]), op=tfc.Max if ODD else tfc.Sum),
    "root": lambda: tfc.broadcast(tf.ones([2]), root_rank=1 if ODD else 0),
    "rows": lambda: tfc.allgather(tf.ones([RANK + 1, 5 if ODD else 4])),
    "operation": either(
        lambda: tfc.allgather(tf.ones([2])), lambda: tfc.allreduce(tf.ones([2]))
    ),
    "name": lambda: tfc.allreduce(tf.ones([2]), name="b" if ODD else "a"),
    "barrier": either(tfc.barrier, lambda: tfc.allreduce(tf.ones([2]))),
}


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        act()
    except Exception as error:
        seconds = time.monotonic() - began
        return {"type": type(error).__name__, "text": str(error), "seconds": seconds}
    return {}


def in_graph(act: Callable[[], Any]) -> Callable[[], Any]:
    function = tf.function(lambda: act())
    return lambda: function()


found = {}
for name, case in CASES.items():
    found[f"{name} eager"] = outcome(case)
    tfc.shutdown()
    tfc.init()
    if name == "barrier":
        continue
    found[f"{name} graph"] = outcome(in_graph(case))
    tfc.shutdown()
    tfc.init()
tfc.barrier()
print(json.dumps(found))

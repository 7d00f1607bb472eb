"""Pushes gradients to the ps tasks and gets the weights back; prints median seconds.

``argv[1]``: the number of elements of the variable; ``argv[2]``: ``sum`` (the ps
subtracts gradients) or ``none`` (the ps ignores them). Started by ``tfcluster launch``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.context import context_from
from tfcluster.runtime.parameter_server.client import (
    ModelVariable,
    ParameterServerClient,
    VariablePiece,
)
from tfcluster.runtime.parameter_server.update_graph import serialised

REPEATS, WARM = 30, 5

count = int(sys.argv[1])
context = context_from(os.environ)
servers = ParameterServerClient(
    context.parameter_servers, rank=context.rank, size=context.size, token=context.token
)
held: list[int] = []
"""The bytes on each ps. The only worker defines the model for all of them."""
variable = ModelVariable("weights", "float32", (count // 1000, 1000))


def pack(pieces: Sequence[VariablePiece], kinds: str) -> bytes:
    rows = [piece.end - piece.start for piece in pieces]
    held.append(4 * 1000 * sum(rows))
    replicas = [tf.Variable(tf.zeros([each, 1000])) for each in rows]

    def apply(gradients: list[Any]) -> None:
        for replica, gradient in zip(replicas, gradients, strict=True):
            if sys.argv[2] == "sum":
                replica.assign_sub(gradient)

    return serialised(apply, replicas, {}, kinds)


zeros = np.zeros(variable.shape, np.float32)
servers.open("model", [variable], [zeros], "d", pack, splittable=True)
gradient = np.ones(variable.shape, np.float32)
times = []
for _ in range(WARM + REPEATS):
    begin = time.perf_counter()
    servers.push("model", [gradient])
    times.append(time.perf_counter() - begin)
if context.rank == 0:
    found = {
        "push": statistics.median(times[WARM:]),
        "bytes": held,
    }
    print("TIMES", json.dumps(found), flush=True)

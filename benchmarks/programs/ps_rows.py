"""Pushes gradients of an Embedding to a ps, as rows and as a whole; prints medians.

The Embedding has 1 M rows of 64, of which a step touches 1 %. Started by ``tfcluster
launch``.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Slices
from tfcluster.runtime.context import context_from
from tfcluster.runtime.parameter_server.client import (
    ModelVariable,
    ParameterServerClient,
    VariablePiece,
)
from tfcluster.runtime.parameter_server.update_graph import serialised

ROWS, COLUMNS, TOUCHED = 1_000_000, 64, 10_000
REPEATS, WARM = {"rows": 60, "whole": 10}, 3

context = context_from(os.environ)
servers = ParameterServerClient(
    context.parameter_servers, rank=context.rank, size=context.size, token=context.token
)
table = ModelVariable("table", "float32", (ROWS, COLUMNS), rows_only=True)


def pack(pieces: Sequence[VariablePiece], kinds: str) -> bytes:
    replica = tf.Variable(tf.zeros([pieces[0].end - pieces[0].start, COLUMNS]))

    def apply(gradients: list[Any]) -> None:
        (gradient,) = gradients
        if isinstance(gradient, tf.IndexedSlices):
            values = 0.1 * gradient.values
            replica.scatter_sub(tf.IndexedSlices(values, gradient.indices))
        else:
            replica.assign_sub(0.1 * gradient)

    return serialised(apply, [replica], {}, kinds)


zeros = np.zeros(table.shape, np.float32)
for name, kinds in (("rows", "s"), ("whole", "d")):
    # Separate tables: after row updates, TensorFlow copies a table on each full read.
    servers.open(name, [table], [zeros], kinds, pack)
rng = np.random.default_rng(0)
values = rng.normal(size=(TOUCHED, COLUMNS)).astype(np.float32)
found = {}
for name in ("rows", "whole"):
    times, moved = [], 0
    for _ in range(WARM + REPEATS[name]):
        indices = rng.choice(ROWS, TOUCHED, replace=False)
        gradient: Any = Slices(values, indices)
        if name == "whole":
            gradient = zeros.copy()
            gradient[indices] = values
        before = servers.sent_bytes
        begin = time.perf_counter()
        servers.push(name, [gradient])
        times.append(time.perf_counter() - begin)
        moved = servers.sent_bytes - before
    found[name] = statistics.median(times[WARM:])
print("TIMES", json.dumps(found), flush=True)

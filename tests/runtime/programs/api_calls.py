# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Calls of the Python API, on every rank: results as JSON on the last line."""

import json
import os

import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc

RANK = int(os.environ["TFCLUSTER_RANK"])

tfc.init()
tfc.init()
own = tf.constant([[1.0, 2.0]]) * (RANK + 1)
found = {
    "who": [tfc.rank(), tfc.size(), tfc.local_rank(), tfc.local_size(), tfc.is_chief()],
    "hosts": [tfc.cross_rank(), tfc.cross_size()],
    "initialized": tfc.is_initialized(),
}


def call(name, act):
    """Call ``act`` eagerly, in a function, and in one with an unknown shape."""
    eager = act(own)
    graph = tf.function(act)(own)
    loose = tf.function(act, input_signature=[tf.TensorSpec([None, 2], tf.float32)])(
        own
    )
    assert np.array_equal(eager, graph), name
    assert np.array_equal(eager, loose), name
    found[name] = eager.numpy().tolist()


call("average", lambda x: tfc.allreduce(x))
call("sum", lambda x: tfc.allreduce(x, average=False))
call("min", lambda x: tfc.allreduce(x, op=tfc.Min))
call("max", lambda x: tfc.allreduce(x, op=tfc.Max))
call("product", lambda x: tfc.allreduce(x, op=tfc.Product))
call("rows", lambda x: tfc.allgather(tf.repeat(x, RANK, axis=0)))
call("columns", lambda x: tfc.allgather(tf.repeat(x, RANK + 1, axis=1), axis=1))
call("broadcast", lambda x: tfc.broadcast(x, tfc.size() // 2))
call(
    "slices",
    lambda x: tf.convert_to_tensor(
        tfc.allreduce(
            tf.IndexedSlices(x[:, :1], tf.constant([RANK % 2]), tf.constant([2, 1]))
        )
    ),
)

for dtype in ("float16", "bfloat16", "float64", "int32", "uint8", "complex64"):
    tensor = tf.cast(own, dtype)
    total = tfc.allreduce(tensor, op=tfc.Sum)
    shared = tfc.broadcast(tensor, 0)
    gathered = tfc.allgather(tensor)
    assert total.dtype == shared.dtype == gathered.dtype == tensor.dtype
    found[f"dtype {dtype}"] = [
        tf.math.real(tf.cast(t, "complex64")).numpy().ravel().tolist()
        for t in (total, shared, gathered)
    ]
found["whole average"] = int(tfc.allreduce(tf.constant(RANK + 1)))
found["variable"] = float(tfc.allreduce(tf.Variable(float(RANK))))
found["bools"] = tfc.allgather(tf.constant([RANK == 1])).numpy().tolist()

for name, act in {
    "strings": lambda: tfc.allreduce(tf.constant("x")),
    "scalar": lambda: tfc.allgather(tf.constant(1)),
    "both": lambda: tfc.allreduce(own, average=True, op=tfc.Sum),
}.items():
    try:
        act()
    except (TypeError, ValueError) as error:
        found[name] = str(error)
tfc.barrier()

try:
    tfc.allreduce(tf.ones([2 + RANK // 2]), name="weights")
except tfc.CollectiveMismatchError as error:
    found["mismatch"] = str(error)
tfc.shutdown()
found["after"] = tfc.is_initialized()
print(json.dumps(found))

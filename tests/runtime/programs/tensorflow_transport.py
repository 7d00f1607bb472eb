# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Calls over the tensorflow transport, on every rank; the last line is JSON.

    tensorflow_transport.py DEED [PIPE]

DEED: calls, kill, late, broken, early, late_start, late_init, configured or strategy.

The caller sets TF_CONFIG and the other variables.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, reduce_arrays
from tfcluster.runtime.collective.transports.tensorflow import (
    transport as tensorflow_transport,
)

# Lets small arrays use the path that is meant for large ones.
tensorflow_transport._DIRECT_BYTES = 1 << 14

RANK = int(os.environ["TFCLUSTER_RANK"])
SIZE = int(os.environ["TFCLUSTER_SIZE"])
ROWS = 5000
DTYPES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
found: dict[str, Any] = {}


def transport() -> Any:
    return process_group.group()._transport


def monitor() -> Any:
    return process_group.group()._monitor


def carried(act):
    """What ``act`` returns, and the number of bytes sent by TensorFlow's ops."""
    before = transport().carried_bytes
    result = act()
    return result, transport().carried_bytes - before


def reduced(array, op=ReduceOp.SUM):
    return reduce_arrays(
        process_group.group(), [array], op, Signature(f"reduce {op.value}")
    )[0]


def calls():
    found["own device"] = tf.constant(1.0).device
    for dtype in DTYPES:
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            if dtype.startswith("complex") and op is not ReduceOp.SUM:
                continue
            ranks = [np.random.RandomState(r) for r in range(SIZE)]
            values = [(rng.randint(-9, 10, ROWS * 4)).astype(dtype) for rng in ranks]
            expected = values[0]
            for value in values[1:]:
                ufunc = {"sum": np.add, "product": np.multiply}.get(op.value)
                ufunc = ufunc or getattr(np, f"{op.value}imum")
                expected = ufunc(expected, value)
            result, count = carried(lambda op=op, v=values[RANK]: reduced(v, op))
            assert result.dtype == expected.dtype, (dtype, op)
            assert np.array_equal(result, expected), (dtype, op)
            found[f"{dtype} {op.value}"] = count
    small, found["small"] = carried(lambda: reduced(np.ones(8, np.float32)))
    assert small.tolist() == [SIZE] * 8
    lengths = [0, 40_001, 7][:SIZE]
    data = [bytes([r + 1]) * lengths[r] for r in range(SIZE)]
    gathered, found["gathered"] = carried(
        lambda: allgather_bytes(process_group.group(), data[RANK], Signature("gather"))
    )
    assert gathered == data
    own = np.full(ROWS * 4, RANK + 1.0, np.float32)
    in_graph = tf.function(
        lambda: tf.numpy_function(lambda: reduced(own), [], tf.float32), autograph=False
    )
    total = in_graph()
    found["in a function"] = float(total[0])


def kill():
    """The last rank is killed while the others wait for it in an op."""
    reduced(np.ones(ROWS, np.float32))
    if RANK == SIZE - 1:
        agree = process_group.group()._agree

        def agree_and_die(*words):
            agree(*words)
            os.kill(os.getpid(), signal.SIGKILL)

        vars(process_group.group())["_agree"] = agree_and_die
    report(lambda: reduced(np.ones(ROWS, np.float32)))
    report(lambda: reduced(np.ones(ROWS, np.float32)))


def early():
    """The last rank is killed before TensorFlow's first op, where the others wait."""
    tfc.init()
    monitor().join()
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    report(lambda: tf.constant(1.0))
    found["seconds"] = time.monotonic() - began


def late_start():
    """The last rank delays its first op until it learns that the others wait."""
    tfc.init()
    if RANK == SIZE - 1:
        told, say = threading.Event(), monitor()._say

        def say_and_tell(text):
            say(text)
            told.set()

        vars(monitor())["_say"] = say_and_tell
        told.wait(50)
    found["total"] = float(reduced((tf.ones(ROWS) + 1.0).numpy())[0])


def late():
    """The last rank does not call an op that all ranks have agreed on."""
    tfc.init()
    reduced(np.ones(ROWS, np.float32))
    if RANK == SIZE - 1:
        agree = process_group.group()._agree

        def agree_and_wait(*words):
            agree(*words)
            transport().allgather(b"")  # until the others disconnect

        vars(process_group.group())["_agree"] = agree_and_wait
    report(lambda: reduced(np.ones(ROWS, np.float32)))


def broken():
    """The last rank fails in an exchange, but stays alive until the others are done."""
    tfc.init()
    reduced(np.ones(ROWS, np.float32))
    if RANK == SIZE - 1:
        agree = process_group.group()._agree

        def agree_and_fail(*words):
            agree(*words)
            raise tfc.CollectiveError("out of memory")

        vars(process_group.group())["_agree"] = agree_and_fail
    report(lambda: reduced(np.ones(ROWS, np.float32)))
    # Opening a pipe blocks until the other end is opened.
    Path(sys.argv[2]).open("r" if RANK == SIZE - 1 else "w").close()


def report(act):
    try:
        act()
    except tfc.CollectiveError as error:
        found.setdefault("errors", []).append([type(error).__name__, str(error)])


def late_init():
    """init() is called after an op, without injection."""
    tf.constant(1)
    report(tfc.init)


def configured():
    """A program may configure threads and devices after its imports."""
    tf.config.threading.set_inter_op_parallelism_threads(2)
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    # A process forked before the first op is not a rank, so it waits for no other.
    child = os.fork()
    if child == 0:
        os._exit(int(tf.constant(7)))
    found["forked"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = reduced(np.full(ROWS, RANK + 1.0))
    found["threads"] = tf.config.threading.get_inter_op_parallelism_threads()
    found["devices"] = len(tf.config.list_logical_devices("CPU"))
    found["total"] = float(total[0])


def strategy():
    """MultiWorkerMirroredStrategy and the runtime take turns on one server."""
    tfc.init()
    mirrored = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def theirs(value):
        each = mirrored.run(lambda: value + tf.zeros([ROWS]))
        return mirrored.reduce("SUM", each, axis=None)

    for step in range(3):
        ours, count = carried(lambda s=step: reduced(np.full(ROWS, s + RANK, "f4")))
        assert count
        assert ours[0] == sum(step + rank for rank in range(SIZE))
        total = theirs(tf.fill([ROWS], float(step * 10 + RANK)))
        assert float(total[0]) == sum(step * 10 + rank for rank in range(SIZE))
    found["steps"] = 3


# A rank that hangs shows its stack.
faulthandler.dump_traceback_later(60, exit=True)
globals()[sys.argv[1]]()
print(json.dumps(found))

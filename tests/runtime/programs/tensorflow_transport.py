# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Calls over the tensorflow transport, on every rank; the last line is JSON.

    tensorflow_transport.py DEED

DEED: device, early, late_start, late_init, configured or strategy.

The caller sets TF_CONFIG and the other variables.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays

RANK = int(os.environ["TFCLUSTER_RANK"])
SIZE = int(os.environ["TFCLUSTER_SIZE"])
ROWS = 5000
found: dict[str, Any] = {}


def monitor() -> Any:
    return process_group.group()._monitor


def reduced(array):
    signature = Signature("reduce sum")
    return reduce_arrays(process_group.group(), [array], ReduceOp.SUM, signature)[0]


def device():
    found["own device"] = tf.constant(1.0).device


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
        ours = reduced(np.full(ROWS, step + RANK, "f4"))
        assert ours[0] == sum(step + rank for rank in range(SIZE))
        total = theirs(tf.fill([ROWS], float(step * 10 + RANK)))
        assert float(total[0]) == sum(step * 10 + rank for rank in range(SIZE))
    found["steps"] = 3


# A rank that hangs shows its stack.
faulthandler.dump_traceback_later(60, exit=True)
globals()[sys.argv[1]]()
print(json.dumps(found))

"""A program with process sets that ends training when a signal comes.

Each rank prints its steps, and "handled at step N" when all ranks have met again.
"""

import os
import time

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
pair, single = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])
for each in (pair, single):
    hvd.add_process_set(each)
mine = pair if pair.included() else single
value = tf.constant(float(hvd.rank()))
step = 0
try:
    while True:
        step += 1
        hvd.allreduce(value, process_set=mine)
        if hvd.rank() == 1:
            time.sleep(0.02)  # The others wait for this rank.
        if step % 7 == 0:
            hvd.allreduce(value)
        os.write(1, b"step %d\n" % step)
except KeyboardInterrupt:
    assert float(hvd.allreduce(tf.constant(1.0))) == 1.0
    print(f"handled at step {step}", flush=True)

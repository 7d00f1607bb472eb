"""A rank that exchanges for ever, and prints "under way" after some rounds.

    looping_rank.py LENGTH [forking|waiting RANK]

RANK also forks a process that outlives it, or waits before its first exchange.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import tfcluster.runtime as tfc
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays

vector = np.ones(int(sys.argv[1]), "float32")  # before others wait for this rank
tfc.init()
deed, who = sys.argv[2:] or ("", "-1")
mine = deed if tfc.rank() == int(who) else ""
rounds = 0
if mine == "waiting":
    monitor = process_group.group()._monitor
    assert monitor
    monitor.join()
    print("under way", flush=True)
    signal.pause()
try:
    while True:
        reduce_arrays(
            process_group.group(), [vector], ReduceOp.SUM, Signature("gradients of sgd")
        )
        rounds += 1
        if rounds == 3 and mine == "forking":
            child = os.fork()
            if child == 0:
                signal.pause()
            print(child, flush=True)
        if rounds == 5:
            print("under way", flush=True)
except tfc.CollectiveError as error:
    print(f"failed {time.monotonic()} {type(error).__name__}: {error}", flush=True)
    sys.exit(3)

# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Trains with a ps, and prints which of the ps's two ports accept connections."""

from __future__ import annotations

import json
import os
import socket

import keras
import numpy as np

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, verbose=0)


def accepts(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 10.0).close()
    except ConnectionRefusedError:
        return False
    return True


(tensorflow,) = json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"]
ours = os.environ["TFCLUSTER_PARAMETER_SERVERS"]
print("PORTS", json.dumps({"tensorflow": accepts(tensorflow), "ours": accepts(ours)}))

"""Trains from a dataset, and ends when the file in the first argument exists."""

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

rows = np.ones((32, 2), np.float32)
data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(8)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(data, verbose=0)
print("READY", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)

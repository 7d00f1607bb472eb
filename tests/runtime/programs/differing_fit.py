"""One rank trains a different model or calls more methods: differing_fit.py WHAT."""

import os
import sys

import keras
import numpy as np

odd = int(os.environ["TFCLUSTER_RANK"]) == int(os.environ["TFCLUSTER_SIZE"]) - 1
units = 3 if odd and sys.argv[1] == "model" else 2
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="last")])
model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
x, y = np.ones((12, 4), "float32"), np.ones((12, 1), "float32")
fits = 2 if odd and sys.argv[1] == "more" else 1
for _ in range(fits):
    if odd and sys.argv[1] == "evaluate":
        model.evaluate(x, y, batch_size=4, verbose=0)
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
print("trained")

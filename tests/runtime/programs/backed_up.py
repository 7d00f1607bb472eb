"""A program that goes on after an interruption: Keras's BackupAndRestore.

Each rank prints its steps, and a digest of the weights when training has ended.
"""

import hashlib
import os

import keras
import numpy as np

keras.utils.set_random_seed(4)
x = np.random.default_rng(1).normal(size=(256, 16)).astype("float32")
y = x[:, :1] * 2
model = keras.Sequential([keras.layers.Dense(32), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.build((None, 16))


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        os.write(1, b"epoch %d\n" % epoch)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        os.write(1, b"step %d\n" % int(model.optimizer.iterations))


callbacks = [keras.callbacks.BackupAndRestore("backup"), Watch()]
model.fit(x, y, batch_size=32, epochs=12, shuffle=False, verbose=0, callbacks=callbacks)
digest = hashlib.sha256()
for value in [*model.get_weights(), *model.optimizer.variables]:
    digest.update(np.asarray(value).tobytes())
print(f"RESULT {digest.hexdigest()} of step {int(model.optimizer.iterations)}")

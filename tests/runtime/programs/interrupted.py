"""A program that saves its model once when a signal comes: interrupted.py IDIOM.

Each rank prints "begun", its steps, and "handled at step N".
"""

import atexit
import os
import random
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

IDIOM = sys.argv[1]
EAGER = IDIOM == "eager"
keras.utils.set_random_seed(4)
x = np.random.default_rng(1).normal(size=(512, 16)).astype("float32")
y = x[:, :1] * 2
model = keras.Sequential([keras.layers.Dense(32), keras.layers.Dense(1)])
model.compile("adam", "mse", run_eagerly=EAGER)
model.build((None, 16))


def steps() -> int:
    return int(model.optimizer.iterations)


def save(*_: object) -> None:
    step = steps()
    model.save("saved.keras")
    print(f"handled at step {step}", flush=True)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def leave(*_: object) -> None:
    sys.exit(0)


def save_and_leave(*_: object) -> None:
    save()
    sys.exit(0)


stopping = False


def stop(*_: object) -> None:
    global stopping
    stopping = True


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if stopping:
            self.model.stop_training = True
        os.write(1, b"step %d\n" % steps())


def fit(*more: keras.callbacks.Callback) -> None:
    os.write(1, b"begun\n")
    callbacks = [*more, Watch()]
    model.fit(x, y, batch_size=32, epochs=10_000, verbose=0, callbacks=callbacks)


signals = [signal.SIGTERM, signal.SIGUSR1]
if IDIOM == "flag":
    for number in [signal.SIGINT, *signals]:
        signal.signal(number, stop)
    fit()
    save()
elif IDIOM in ("except", "eager"):
    for number in signals:
        signal.signal(number, interrupt)
    try:
        fit()
    except KeyboardInterrupt:
        save()
elif IDIOM == "saving":
    signal.signal(signal.SIGTERM, interrupt)
    try:
        fit(keras.callbacks.ModelCheckpoint("saved.keras", save_freq=1))
    except KeyboardInterrupt:
        save()
elif IDIOM == "handler":
    for number in [signal.SIGINT, *signals]:
        signal.signal(number, save_and_leave)
    fit()
elif IDIOM == "slurm":
    signal.signal(signal.SIGUSR1, save_and_leave)
    fit()
elif IDIOM == "atexit":
    atexit.register(save)
    for number in signals:
        signal.signal(number, leave)
    fit()
elif IDIOM == "busy":
    # After training, each rank computes something of its own for a different time.
    signal.signal(signal.SIGTERM, interrupt)
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[Watch()])
    os.write(1, b"begun\n")
    try:
        while True:
            time.sleep(0.001 * random.random())
    except KeyboardInterrupt:
        save()
elif IDIOM == "loop":
    signal.signal(signal.SIGTERM, interrupt)
    os.write(1, b"begun\n")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features) - labels) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    try:
        while True:
            for at in range(0, len(x), 32):
                step(x[at : at + 32], y[at : at + 32])
                os.write(1, b"step %d\n" % steps())
    except KeyboardInterrupt:
        save()
else:
    sys.exit(f"no idiom {IDIOM}")

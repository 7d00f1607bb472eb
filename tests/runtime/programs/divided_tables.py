"""Trains a model with a large table, saves it, and notes what it holds.

Arguments: the stem of the files, and the names of optimizers.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

ROWS, WIDTH = 1009, 8
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "compiled": lambda: keras.optimizers.Adam(0.05),
}


def build_model() -> keras.Model:
    tokens, numbers = keras.Input((5,), dtype="int32"), keras.Input((3,))
    rows = keras.layers.Embedding(ROWS, WIDTH, mask_zero=True)(tokens)
    pooled = keras.layers.GlobalAveragePooling1D()(rows)
    joined = keras.layers.Concatenate()([pooled, numbers])
    hidden = keras.layers.Dropout(0.2)(joined)
    return keras.Model([tokens, numbers], keras.layers.Dense(1)(hidden))


def train(stem: str, rank: str, name: str) -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(5)
    # Few of the rows, so that some come twice in a batch; the last batch is smaller.
    tokens = (random.random((43, 5)) ** 3 * ROWS).astype("int32")
    x = [tokens, random.normal(size=(43, 3)).astype("float32")]
    y = random.normal(size=(43, 1)).astype("float32")
    model = build_model()
    by_xla = name == "compiled"
    model.compile(OPTIMIZERS[name](), "mse", steps_per_execution=2, jit_compile=by_xla)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    # Its length is not known.
    data = tf.data.Dataset.from_tensor_slices((tuple(x), y)).filter(lambda *_: True)
    losses = model.fit(data.batch(16), epochs=2, verbose=0).history["loss"]
    table = model.layers[1].embeddings
    values = {v.path: v.numpy() for v in (*model.variables, *model.optimizer.variables)}
    values |= {"losses": np.array(losses), "predicted": model.predict(x, verbose=0)}
    model.save(f"{stem}.{name}.keras")
    # An eager change, and what a function sees of it.
    table.assign(table + 1.0)
    values["changed"] = model.predict(x, verbose=0)
    loaded = keras.models.load_model(f"{stem}.{name}.keras")
    values["loaded"] = loaded.predict(x, verbose=0)
    loaded.fit(x, y, batch_size=16, verbose=0)
    values["continued"] = loaded.predict(x, verbose=0)
    np.savez(f"{stem}.{name}-{rank}.npz", **values)


def train_kernels(stem: str, rank: str) -> None:
    """Products with kernels that are divided need the whole batch.

    It has 32 rows in some steps of a loop, and 20 in the last.
    """
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(0)
    x = random.normal(size=(116, 24)).astype("float32")
    y = random.integers(0, 3, 116)
    hidden = [keras.layers.Dense(units, activation="relu") for units in (300, 250)]
    model = keras.Sequential([keras.Input((24,)), *hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=2)
    losses = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history["loss"]
    values = {variable.path: variable.numpy() for variable in model.variables}
    np.savez(f"{stem}.kernels-{rank}.npz", losses=losses, **values)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        given = sys.argv[1], os.environ.get("TFCLUSTER_RANK", "0")
        if name == "kernels":
            train_kernels(*given)
        else:
            train(*given, name)

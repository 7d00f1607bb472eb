# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trains with optimizers whose variables may be divided; RESULTS gets arrays.

    shard_optimizer.py RESULTS [DEED...]

RESULTS-<rank>.npz holds what each deed returns, as DEED/NAME. Files are below the
working folder. HOSTS has a letter for each rank: those of one letter are on one host.
"""

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import CollectiveError, process_group
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.divided_variables import DividedVariables

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))
SIZE = int(os.environ.get("TFCLUSTER_SIZE", "1"))
LAST = RANK == SIZE - 1

if hosts := os.environ.get("HOSTS"):
    # Each rank says on which host it is.
    hooked: Any = process_group.group()._transport
    hooked._host_key = hosts[RANK]


def data():
    random = np.random.default_rng(1)
    x = random.normal(size=(50, 40)).astype("float32")
    return x, random.normal(size=(50, 3)).astype("float32")


def new_model(optimizer=None, **options):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((40,)),
            keras.layers.Dense(201, activation="relu"),
            keras.layers.Dense(100, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    updates = optimizer or keras.optimizers.Adam(0.01)
    model.compile(updates, "mse", metrics=["mae"], **options)
    return model


def fit(model, epochs=2, **kwargs):
    # The last of four batches has two rows: fewer than three ranks.
    x, y = data()
    return model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, **kwargs)


def state(model):
    """Weights and slots, as the script reads them."""
    weights = {f"w{i}": np.asarray(v) for i, v in enumerate(model.weights)}
    slots = {f"s{i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}
    return weights | slots


def held_bytes(optimizer):
    """The bytes of the slots that this rank holds now."""
    total = 0
    for variable in optimizer.variables:
        handle, dtype = tf_functions.handle_of(variable.value), variable.value.dtype
        own = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        total += np.asarray(own).nbytes
        for divided in gc.get_objects():
            if type(divided) is DividedVariables and (own := divided.of(handle)):
                total += np.asarray(own.pieces[0]).nbytes
    return total


def deed_trained():
    model = new_model()
    history = fit(model)
    held = held_bytes(model.optimizer)
    before = model.optimizer.iterations.numpy()
    still = held_bytes(model.optimizer)
    found = state(model)
    whole = held_bytes(model.optimizer)
    evaluated = model.evaluate(*data(), verbose=0)
    fit(model, epochs=1)
    return {
        **found,
        **{f"later_{name}": value for name, value in state(model).items()},
        "loss": history.history["loss"],
        "evaluated": evaluated,
        "iterations": before,
        "bytes": [held, still, whole],
    }


def deed_read_in_callbacks():
    model, norms = new_model(keras.optimizers.SGD(0.05, momentum=0.9)), []

    def read(batch, logs=None):
        norms.append([np.abs(v.numpy()).sum() for v in model.optimizer.variables])

    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=read,
        on_epoch_end=lambda epoch, logs=None: model.evaluate(*data(), verbose=0),
    )
    fit(model, callbacks=[callback])
    return {**state(model), "norms": norms}


def deed_saved():
    model = new_model()
    folder = Path("saved")
    folder.mkdir(exist_ok=True)
    fit(
        model,
        callbacks=[
            keras.callbacks.ModelCheckpoint("saved/{epoch}.keras"),
            keras.callbacks.BackupAndRestore("saved/backup", delete_checkpoint=False),
        ],
    )
    model.save("saved/model.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write("saved/checkpoint")
    saved = state(model)
    fit(model, epochs=1)
    later = state(model)
    checkpoint.read(path).assert_existing_objects_matched()
    restored = state(model)
    fit(model, epochs=1)
    again = state(model)
    loaded = keras.saving.load_model("saved/model.keras")
    fit(loaded, epochs=1)
    resumed = new_model()
    fit(resumed, epochs=3, callbacks=[keras.callbacks.BackupAndRestore("saved/backup")])
    names = {
        "saved": saved,
        "later": later,
        "restored": restored,
        "again": again,
        "loaded": state(loaded),
        "resumed": state(resumed),
    }
    return {f"{name}_{k}": v for name, of in names.items() for k, v in of.items()}


def deed_compiled():
    model = new_model(jit_compile=True)
    fit(model)
    return state(model)


def deed_assigned():
    model = new_model()
    fit(model)
    slots = [v for v in model.optimizer.variables if len(v.shape) == 2]
    slots[0].assign(slots[0] * 0.5)
    slots[1].value.assign_add(np.ones(slots[1].shape, "float32"))
    fit(model)
    return state(model)


def deed_two_optimizers():
    keras.utils.set_random_seed(4)
    maker = keras.Sequential([keras.Input((30,)), keras.layers.Dense(200)])
    judge = keras.Sequential([keras.Input((200,)), keras.layers.Dense(100)])
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.AdamW(0.02)

    @tf.function
    def step(noise, turn):
        with tf.GradientTape() as tape:
            made = judge(maker(noise))
            loss = tf.reduce_mean(made**2) if turn else -tf.reduce_mean(tf.tanh(made))
        model, optimizer = (maker, judge)[turn], optimizers[turn]
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
        return loss

    optimizers[0].build(maker.trainable_variables)
    optimizers[1].build(judge.trainable_variables)
    noise = tf.constant(np.random.default_rng(5).normal(size=(12, 30)), tf.float32)
    losses = [step(noise, turn).numpy() for turn in (0, 1, 1, 0, 1)]
    read = [v.numpy() for optimizer in optimizers for v in optimizer.variables]
    return {
        "losses": losses,
        **{f"s{i}": value for i, value in enumerate(read)},
        **{f"w{i}": v.numpy() for i, v in enumerate([*maker.weights, *judge.weights])},
    }


def deed_another_thread():
    """What is raised in another thread; the training goes on."""
    model = new_model()
    fit(model, epochs=1)
    slot = next(v for v in model.optimizer.variables if len(v.shape) == 2)
    texts = []

    def read():
        try:
            texts.append(str(slot.numpy().shape))
        except CollectiveError as error:
            texts.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    fit(model, epochs=1)
    return {**state(model), "text": texts[0]}


def deed_one_rank_reads():
    """What is raised on all ranks; nothing can be trained after it."""
    model = new_model()
    fit(model, epochs=1)
    try:
        if LAST:
            state(model)
        fit(model, epochs=1)
    except CollectiveError as error:
        return {"text": str(error)}
    return {"text": ""}


found: dict[str, Any] = {}
for name in sys.argv[2:]:
    # Steps are traced faster without the optimization of graphs, as one deed has it.
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": name != "trained"}
    )
    result = globals()[f"deed_{name}"]()
    found |= {f"{name}/{key}": np.asarray(value) for key, value in result.items()}
np.savez(f"{sys.argv[1]}-{RANK}.npz", **found)

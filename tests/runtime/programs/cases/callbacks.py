# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Callbacks that read results, stop training or write files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras.src.datasets import mnist

from tests.runtime.programs.cases.tools import (
    RANK,
    classifier,
    compiled,
    data,
    main,
    results,
)


def case_early_stopping():
    x, y = data()
    model = compiled(classifier(), keras.optimizers.SGD(3.0))
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True
    )
    history = model.fit(
        x, y, batch_size=16, epochs=12, validation_split=0.3, verbose=0,
        callbacks=[stopping],
    )  # fmt: skip
    return {**results(model, history), "epochs": np.array(len(history.epoch))}


def case_callback_list():
    """A CallbackList of the program is the program's again after ``fit``."""
    x, y = data()
    model = compiled(classifier())
    lists = keras.callbacks.CallbackList
    callbacks = lists([], add_history=True, model=model, epochs=2, steps=2, verbose=0)
    for _ in range(2):
        history = model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks)
    # Without parameters, it must not be given any.
    model.fit(x, y, verbose=0, callbacks=lists([], add_progbar=True))
    names = [type(callback).__name__ for callback in callbacks.callbacks]
    return {**results(model, history), "callbacks": np.array(names)}


def case_one_rank_stops():
    """A callback stops training on one rank only, in the middle of an epoch."""

    class Stop(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if RANK == 1 and self.seen == 2:
                self.model.stop_training = True

    x, y = data()
    stop = Stop()
    model = compiled(classifier())
    model.fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[stop])
    return {**results(model), "batches": np.array(stop.seen)}


def case_files():
    written = []
    sys.addaudithook(
        lambda event, args: (
            written.append(str(args[0]))
            if event == "open" and isinstance(args[1], str) and "w" in args[1]
            else None
        )
    )
    x, y = data()
    model = compiled(classifier())
    folder = Path("deep/er")
    model.fit(
        x, y, batch_size=16, epochs=2, validation_split=0.2, verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
            keras.callbacks.ModelCheckpoint(
                str(folder / "{epoch}.weights.h5"), save_weights_only=True
            ),
            keras.callbacks.CSVLogger("log.csv"),
            keras.callbacks.BackupAndRestore("backup"),
        ],
    )  # fmt: skip
    model.save("end.keras")
    again = keras.saving.load_model("end.keras")
    ours = [name for name in written if not name.startswith(("/proc", "/sys", "/dev"))]
    return {
        **results(again),
        "written": np.array(sorted({Path(name).name for name in ours}), dtype=str),
        "same": np.array(
            all(
                np.array_equal(a, b)
                for a, b in zip(model.get_weights(), again.get_weights(), strict=True)
            )
        ),
        "log": np.array(Path("log.csv").read_text()),
    }


def case_checkpoints():
    """TensorFlow checkpoints, as custom loops use them."""
    model = classifier()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), "c", 2)
    path = manager.save()
    before = model.get_weights()
    model.set_weights([np.zeros_like(weight) for weight in before])
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    return {
        "path": np.array(path),
        "files": np.array(sorted(file.name for file in Path("c").iterdir())),
        "restored": np.array(
            all(map(np.array_equal, before, model.get_weights())),
        ),
    }


def case_own_folders():
    """Each process has a different folder name, made of random numbers or the time."""
    x, y = data()
    model = compiled(classifier())
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        best = path / f"best-{uuid.uuid4().hex}.keras"
        log = keras.callbacks.CSVLogger(path / "log.csv")
        model.fit(
            x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0,
            callbacks=[keras.callbacks.ModelCheckpoint(best, save_best_only=True), log],
        )  # fmt: skip
        found["log"] = np.loadtxt(path / "log.csv", delimiter=",", skiprows=1)
        (path / "deep").mkdir()
        model.save_weights(path / "deep" / "end.weights.h5")
        model.save(path / "end.keras")
        model.save(path / "end.keras")
        model.export(path / "exported", verbose=False)
        kept = model.get_weights()
        again = keras.saving.load_model(best)
        found |= {f"best{i}": w for i, w in enumerate(again.get_weights())}
        again.load_weights(path / "deep" / "end.weights.h5")
        found["same"] = np.array(all(map(np.array_equal, kept, again.get_weights())))
        again = keras.saving.load_model(path / "end.keras")
        found["again"] = np.array(all(map(np.array_equal, kept, again.get_weights())))
        served = tf.saved_model.load(folder + "/exported")
        found["served"] = served.serve(x[:3].astype(keras.config.floatx())).numpy()
    return found


def case_checkpoints_in_own_folders():
    model = classifier()
    folder = f"run-{uuid.uuid4().hex}"
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), folder, 2, checkpoint_name=folder
    )
    for step in range(4):
        model.layers[-1].bias.assign([step, step])
        path = manager.save()
    kept = model.get_weights()
    model.set_weights([np.zeros_like(weight) for weight in kept])
    names = [path, manager.latest_checkpoint, tf.train.latest_checkpoint(folder)]
    manager.restore_or_initialize()
    written = [file.name.removeprefix(folder) for file in Path(folder).iterdir()]
    return {
        "restored": np.array(all(map(np.array_equal, kept, model.get_weights()))),
        "named": np.array([Path(name).parent.name == folder for name in names]),
        "numbers": np.array([name.rpartition("-")[2] for name in names]),
        "files": np.array(sorted(written)),
    }


def case_folders_that_others_do_not_see():
    """One path names a different folder on each rank, as without shared storage."""
    here = Path.cwd()
    own = here / f"own-{RANK}"
    own.mkdir()
    model = classifier()
    try:
        os.chdir(own)
        path = Path("/proc/self/cwd") / f"of-{RANK}.keras"
        model.save(path)
        again = keras.saving.load_model(path)
    finally:
        os.chdir(here)
    return {
        "same": np.array(
            all(map(np.array_equal, model.get_weights(), again.get_weights()))
        ),
        "files": np.array([file.suffix for file in own.iterdir()]),
    }


def case_checkpoints_are_known():
    """In a common folder, ranks that wrote nothing know the latest checkpoint, too."""
    model = classifier()
    saved = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(saved, "known", 2)
    manager.save()
    model.layers[-1].bias.assign([1.0, 2.0])
    saved.save("known/by_itself")
    model.layers[-1].bias.assign([2.0, 3.0])
    manager.save()
    model.layers[-1].bias.assign([3.0, 4.0])
    manager.save()
    saves = int(saved.save_counter)
    model.layers[-1].bias.assign([5.0, 6.0])
    path = manager.restore_or_initialize()
    return {
        "saves": np.array(saves),
        "path": np.array(path),
        "kept": np.array(manager.checkpoints),
        "bias": model.layers[-1].bias.numpy(),
    }


def case_downloads():
    """Downloads a file and an archive from ``file://`` URLs."""
    source = Path(__file__).resolve()
    archive = Path("texts.zip").resolve()
    with zipfile.ZipFile(f"{archive}.{RANK}", "w") as made:
        made.writestr("texts/one.txt", "one")
    Path(f"{archive}.{RANK}").replace(archive)
    folder = Path("downloads").resolve()
    folder.mkdir(exist_ok=True)  # Otherwise Keras uses another folder.

    def note(event, args):
        if event == "urllib.Request":
            with Path("requests.txt").open("a") as requests:
                requests.write(f"{args[0]}\n")

    sys.addaudithook(note)
    plain = keras.utils.get_file(
        "plain.txt", source.as_uri(), cache_dir=folder, force_download=True
    )
    assert mnist.get_file is keras.utils.get_file
    unpacked = keras.utils.get_file(
        origin=archive.as_uri(), cache_dir=folder, extract=True
    )
    texts = [path.read_text() for path in sorted(Path(unpacked).rglob("*.txt"))]
    return {
        "plain": np.array(Path(plain).read_text() == source.read_text()),
        "unpacked": np.array(texts),
    }


def case_summaries():
    """A script that writes its summaries itself."""
    writer = tf.summary.create_file_writer("figures")
    with writer.as_default():
        for step in range(3):
            tf.summary.write("loss", 1.0 / (step + 1), step=step)
    writer.flush()
    writer.close()
    return {"steps": np.array(step)}


def case_progress():
    """What callbacks and the program itself see of the progress that Keras prints."""
    x, y = data()
    model, found = compiled(classifier()), []

    class Shown(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(self.params["verbose"])

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        model.fit(x, y, epochs=2, verbose=2, callbacks=[Shown()])
        model.evaluate(x, y, verbose=2)
    losses = re.findall(r"loss: ([0-9.]+)", text.getvalue())
    return {"shown": np.array(found), "losses": np.array(losses, float)}


def case_unwritable():
    model = compiled(classifier())
    try:
        model.save("/proc/nowhere/model.keras")
    except OSError as error:
        return {"raised": np.array(type(error).__name__)}
    return {"raised": np.array("nothing")}


def case_restored():
    """A second fit continues where the first was interrupted."""

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    x, y = data()
    model = compiled(classifier())
    backup = keras.callbacks.BackupAndRestore("restore")
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(
            x, y, batch_size=16, epochs=4, verbose=0, callbacks=[backup, Interrupted()]
        )
    keras.utils.set_random_seed(5)
    model = compiled(classifier())
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0, callbacks=[backup])
    return {**results(model), "epochs": np.array(history.epoch)}


def case_reduced_rate():
    x, y = data()
    model = compiled(classifier(), keras.optimizers.SGD(0.5))
    reduce = keras.callbacks.ReduceLROnPlateau(
        "val_loss", factor=0.3, patience=1, min_delta=0.02
    )
    rates = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    history = model.fit(
        x, y, batch_size=16, epochs=13, validation_split=0.3, verbose=0,
        callbacks=[reduce, keep],
    )  # fmt: skip
    return {**results(model, history), "rates": np.array(rates)}


def case_stopped_by_nan():
    x, y = data()
    x[20] = np.nan
    model = compiled(classifier())
    history = model.fit(
        x, y, batch_size=8, epochs=3, shuffle=False, verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )  # fmt: skip
    return {
        "epochs": np.array(len(history.epoch)),
        "steps": np.array(int(model.optimizer.iterations)),
    }


class Rates(keras.callbacks.CSVLogger):
    """Writes a file, and does what others see as well."""

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = float(self.model.optimizer.learning_rate)
        super().on_epoch_end(epoch, logs)
        self.model.optimizer.learning_rate = 0.05 / (epoch + 2)


class Board(keras.callbacks.TensorBoard):
    """Stops early; without the methods that need the package of that name."""

    def _nothing(self, *_, **__):
        pass

    set_model = on_train_begin = on_train_end = on_epoch_begin = _nothing
    on_train_batch_begin = on_train_batch_end = _nothing
    on_test_begin = on_test_end = on_test_batch_begin = on_test_batch_end = _nothing

    def __init__(self, model):
        super().__init__("board")
        self._stops = model

    def on_epoch_end(self, epoch, logs=None):
        self._stops.stop_training = epoch == 2


def case_writers_that_also_decide():
    """Callbacks that are also writers of files are there on all ranks."""
    x, y = data()
    model = compiled(classifier())
    rates = Rates("rates.csv")
    callbacks = [rates, Board(model)]
    history = model.fit(x, y, batch_size=16, epochs=9, verbose=0, callbacks=callbacks)
    lines = Path("rates.csv").read_text().splitlines()
    return {
        **results(model, history),
        "rates": np.array(history.history["rate"]),
        "lines": np.array(len(lines)),
        "name": np.array(rates.filename),
    }


def case_written():
    """Exports a model, and writes TensorBoard events if TensorBoard is installed."""
    x, y = data()
    model = compiled(classifier())
    boards = []
    if importlib.util.find_spec("tensorboard"):
        boards.append(keras.callbacks.TensorBoard("board", write_graph=False))
    model.fit(
        x, y, batch_size=16, epochs=2, validation_split=0.2, verbose=0, callbacks=boards
    )
    model.export("exported", verbose=False)
    loaded = tf.saved_model.load("exported")
    served = loaded.serve(x[:3].astype(keras.config.floatx()))
    events = sorted(
        path.parent.name for path in Path("board").rglob("events.out.tfevents.*")
    )
    return {
        **results(model),
        "served": served.numpy(),
        "predicted": model.predict(x[:3], verbose=0),
        "events": np.array(events, dtype=str),
    }


def fit_kwargs():
    x, y = data()
    return {
        "x": x[:37], "y": y[:37], "batch_size": 8, "verbose": 0,
        "validation_data": (x[37:], y[37:]),
    }  # fmt: skip


def case_averages_swapped_in():
    """Validation and the best model use the averaged weights."""
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
    model = compiled(classifier(), optimizer)
    history = model.fit(
        **fit_kwargs(), epochs=3,
        callbacks=[
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.ModelCheckpoint("swapped.keras", save_best_only=True),
        ],
    )  # fmt: skip
    best = keras.saving.load_model("swapped.keras")
    found = {f"best_{k}": v for k, v in results(best).items()}
    return {**results(model, history), **found}


def case_averages_swapped_in_by_epochs():
    """Each epoch saves the averaged weights; training continues with the plain ones."""
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.8)
    model = compiled(classifier(), optimizer)
    history = model.fit(
        **fit_kwargs(), epochs=3,
        callbacks=[
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint("{epoch}.swapped.keras"),
        ],
    )  # fmt: skip
    found = {"slots": slots(optimizer)}
    for epoch in (1, 3):
        saved = keras.saving.load_model(f"{epoch}.swapped.keras")
        found |= {f"saved_{epoch}_{k}": v for k, v in results(saved).items()}
        found[f"slots_{epoch}"] = slots(saved.optimizer)
    return {**results(model, history), **found}


def slots(optimizer):
    """All variables of an optimizer in one array."""
    return np.concatenate([np.ravel(v.numpy()) for v in optimizer.variables])


def case_goes_on_from_a_checkpoint():
    """Restores a tf.train checkpoint before the optimizer is built, and later again."""
    model = compiled(classifier(), keras.optimizers.Adam(0.05))
    model.fit(**fit_kwargs(), epochs=2)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(saved, "goes_on", max_to_keep=2)
    manager.save()

    model = compiled(classifier(), keras.optimizers.Adam(0.05))
    again = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(again, "goes_on", max_to_keep=2)
    manager.restore_or_initialize()
    history = model.fit(**fit_kwargs(), epochs=2)
    found = {f"unbuilt_{k}": v for k, v in results(model, history).items()}

    # Training has continued; now go back to the checkpoint.
    again.restore(manager.latest_checkpoint)
    history = model.fit(**fit_kwargs(), epochs=2)
    found |= {f"built_{k}": v for k, v in results(model, history).items()}
    return {**found, "slots": slots(model.optimizer)}


def case_goes_on_from_a_model():
    """Saves a whole model, loads it and trains further; the script reads the slots."""
    model = compiled(classifier(), keras.optimizers.Adam(0.05))
    model.fit(**fit_kwargs(), epochs=1)
    read = slots(model.optimizer)
    model.save("goes_on.keras")
    model = keras.saving.load_model("goes_on.keras")
    history = model.fit(**fit_kwargs(), epochs=2)
    return {**results(model, history), "read": read, "slots": slots(model.optimizer)}


def case_slots_assigned():
    """A script changes momenta, a weight and the learning rate between two fits."""
    model = compiled(classifier(), keras.optimizers.Adam(0.05))
    model.fit(**fit_kwargs(), epochs=1)
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(variable * 0.5)
    model.layers[0].kernel.assign(model.layers[0].kernel * 0.9)
    model.optimizer.learning_rate = 0.01
    history = model.fit(**fit_kwargs(), epochs=1)
    return {**results(model, history), "slots": slots(model.optimizer)}


def case_backed_up():
    """BackupAndRestore after an interrupted second epoch, with averaged weights."""

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def made():
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
        return compiled(classifier(), optimizer)

    backup = keras.callbacks.BackupAndRestore("backed_up")
    with contextlib.suppress(KeyboardInterrupt):
        made().fit(**fit_kwargs(), epochs=3, callbacks=[backup, Interrupted()])
    model = made()
    history = model.fit(**fit_kwargs(), epochs=3, callbacks=[backup])
    return {**results(model, history), "slots": slots(model.optimizer)}


if __name__ == "__main__":
    main(globals())

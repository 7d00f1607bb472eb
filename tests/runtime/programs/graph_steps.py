# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Steps of ``fit`` that exchange by TensorFlow's ops; the last line is JSON.

    graph_steps.py DEED
    graph_steps.py auto GPUS

GPUS is JSON: the GPUs that each rank says it has. DEED: placed, placed_apart, failing,
left_to_the_host, killed, killed_in_a_step, late, late_in_a_step, frozen, own_error,
unlike_data or diverging. The last rank does something that the others do not, in the
fourth step.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tfcluster.runtime import process_group
from tfcluster.runtime.collective.transports.tensorflow import (
    transport as tensorflow_transport,
)
from tfcluster.runtime.collective.transports.tensorflow.devices import (
    GROUP_KEYS,
)
from tfcluster.runtime.partition import exchange
from tfcluster.runtime.partition.hook import Hook

# So small that the model has several buckets.
exchange.BUCKET_BYTES = 500

RANK = int(os.environ["TFCLUSTER_RANK"])
SIZE = int(os.environ["TFCLUSTER_SIZE"])
LAST = RANK == SIZE - 1
STEP = 3
found: dict[str, Any] = {}


def fit(act=None, layers=(), rows=96, seed=5, **kwargs):
    """Train; the last rank calls ``act`` before its fourth step."""
    model = kwargs.pop("model", None)
    if model is None:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(300, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                *layers,
                keras.layers.Dense(2),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 8)).astype("float32")
    y = draw.integers(0, 2, rows)

    def before(batch, logs=None):
        found["began"] = time.monotonic()
        if act is not None and LAST and batch == STEP:
            act()

    hook = keras.callbacks.LambdaCallback(on_train_batch_begin=before)
    model.fit(x, y, batch_size=12, verbose=0, callbacks=[hook], **kwargs)
    return model


class Acting(keras.layers.Layer):
    """Calls ``act`` on the last rank in the fourth step, in the forward pass."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.steps = 0

    def call(self, inputs, training=False):
        def count(x):
            self.steps += 1
            if LAST and self.steps == STEP + 1:
                self.act()
            return x

        @tf.custom_gradient
        def through(x):
            y = tf.numpy_function(count, [x], x.dtype)
            return tf.ensure_shape(y, x.shape), lambda upstream: upstream

        return through(inputs) if training else inputs


def report(act):
    try:
        act()
    except Exception as error:
        found["error"] = [type(error).__name__, str(error)]
    found["seconds"] = time.monotonic() - found.pop("began")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait():
    """Until the others have given up."""
    monitor: Any = process_group.group()._monitor
    with monitor._changed:
        monitor._changed.wait_for(lambda: monitor._exit_reports, 50)


def killed():
    report(lambda: fit(die))


def killed_in_a_step():
    report(lambda: fit(layers=[Acting(die)]))


def late():
    report(lambda: fit(wait))


def late_in_a_step():
    report(lambda: fit(layers=[Acting(wait)]))


def own_error():
    def fail():
        raise ValueError("bad row")

    report(lambda: fit(layers=[Acting(fail)]))


def frozen():
    """The last rank freezes a layer, so it has fewer gradients."""
    model = fit()
    if LAST:
        model.layers[0].trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    report(lambda: fit(model=model))


def unlike_data():
    """The last rank has other labels."""
    model = fit(seed=6 if LAST else 5)
    found["weights"] = [float(w.sum()) for w in model.get_weights()]
    found.pop("began")


def diverging():
    """The last rank changes its learning rate."""
    model = fit()

    def change():
        model.optimizer.learning_rate = 0.02

    report(lambda: fit(change, model=model))


def placed():
    """The collective ops of the step, and those that call Python."""
    model = fit()
    (program,) = [each for each in hook().programs if each.trains and each.written]
    ops = ops_of(program.written.definitions)
    found["ops"] = [op for op in ops if "Py" in op[0] or "Collective" in op[0]]
    found["weights"] = [float(w.sum()) for w in model.get_weights()]
    found.pop("began")


def placed_apart():
    """The same with gradients on another device than what the CPU needs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    transport: Any = process_group.group().transport
    agreed = transport._agreed_groups

    def groups():
        own = agreed()
        names = [f"{task}/device:CPU:1" for task in transport._task.ranks]
        key = GROUP_KEYS[2]
        return replace(own, large=replace(own.large, key=key, own=names[RANK]))

    transport._agreed_groups = groups
    placed()


def failing():
    """A step of a loop that fails twice; the program catches it."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(90, 8)).astype("float32")
    y = draw.normal(size=(90, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    specs = [tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1])]
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(30, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    calls = tf.Variable(0)

    @tf.function(input_signature=specs)
    def step(x, y):
        number = calls.assign_add(1)
        allowed = tf.debugging.Assert(tf.reduce_all(number != (5, 6)), ["bad step"])
        with tf.GradientTape() as tape, tf.control_dependencies([allowed]):
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    failed = 0
    for _ in range(2):
        for batch in dataset:
            try:
                step(*batch)
            except tf.errors.InvalidArgumentError:
                failed += 1
    weights = np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
    found["failing"] = {"weights": weights, "failed": failed}


def left_to_the_host():
    """A function that exchanges what TensorFlow's ops do not support, too."""

    def numbers(x):
        mean = tf.reduce_mean(x, 0)
        return mean, tf.strings.as_string(x[:, 0] - mean[0]), tf.reduce_max(x)

    x = tf.constant(np.random.default_rng(1).normal(size=(10, 3)))
    step = tf.function(numbers)
    for _ in range(3):
        mean, strings, largest = step(x)
        whole = numbers(x)
        np.testing.assert_allclose(mean, whole[0], 1e-12)
        assert largest == whole[2]
        texts = [text.decode() for text in strings.numpy()]
        wholes = [text.decode() for text in whole[1].numpy()]
        np.testing.assert_allclose([*map(float, texts)], [*map(float, wholes)], 1e-4)
        found["texts"] = texts
    (program,) = [each for each in hook().programs if each.is_divided]
    found["kinds"] = sorted({op[0] for op in ops_of(program.written.definitions)})


def auto():
    """``placed``, or ``placed_apart`` if the ranks agree to use TensorFlow's ops."""
    seen = json.loads(sys.argv[2])[RANK]
    tensorflow_transport.visible_gpus = lambda: tuple(seen)
    transport: Any = process_group.group().transport
    agreed = transport._agreed_on_ops
    transport._agreed_on_ops = lambda: found.setdefault("uses_ops", agreed())
    transport._unless = lambda why: found.update(why=why)
    placed_apart()
    found["own"] = tf.constant(0.0).device


def hook():
    """The hook that has divided the functions of this process."""
    (one,) = [each for each in gc.get_objects() if isinstance(each, Hook)]
    return one


def ops_of(functions):
    """Kind, device and instance key of each op of these functions.

    Also how many ops of the backward pass have to end before (``ops_before``).
    """
    for nodes in [each.node_def for each in functions]:
        constants = {
            node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"
        }
        for node in nodes:
            key = None
            if node.op.startswith("Collective"):
                source = node.input[3].partition(":")[0]
                key = int(tf.make_ndarray(constants[source]))
            before = ops_before(node, nodes) if key else []
            passed = sum(one.name.startswith("gradient_tape/") for one in before)
            yield [node.op, node.device, key, passed]


def ops_before(node, nodes):
    """The ops that have to end before ``node`` begins."""
    by_name = {one.name: one for one in nodes}
    waiting, before = [node], {}
    while waiting:
        for each in waiting.pop().input:
            source = by_name.get(each.lstrip("^").partition(":")[0])
            if source is not None and source.name not in before:
                before[source.name] = source
                waiting.append(source)
    return before.values()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)
    globals()[sys.argv[1]]()
    assert tfc.size() == SIZE
    print(json.dumps(found))

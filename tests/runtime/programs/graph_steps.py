# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Steps of ``fit`` whose gradients are exchanged in the graph; the last line is JSON.

    graph_steps.py DEED
    graph_steps.py auto GPUS

GPUS is JSON: the GPUs that each rank says it has. DEED: placed, placed_apart, loops,
rounded, killed, killed_in_a_step, late, late_in_a_step, frozen, own_error, unlike_data
or diverging. The last rank does something that the others do not, in the fourth step.
"""

import faulthandler
import json
import os
import re
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

RANK = int(os.environ["TFCLUSTER_RANK"])
SIZE = int(os.environ["TFCLUSTER_SIZE"])
LAST = RANK == SIZE - 1
STEP = 3
BRANCH = re.compile(r"cond(_\d+)?_true_")
"""The beginning of the names that TensorFlow gives functions for branches."""
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
    report(lambda: fit(seed=6 if LAST else 5))


def diverging():
    """The last rank changes its learning rate."""
    model = fit()

    def change():
        model.optimizer.learning_rate = 0.02

    report(lambda: fit(change, model=model))


def placed():
    """The collective ops of the step, and those that call Python."""
    model = fit()
    ops = ops_of(function_in(model.train_function))
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
        key = transport._keys.group_key(names)
        return replace(own, large=replace(own.large, key=key, own=names[RANK]))

    transport._agreed_groups = groups
    placed()


def loops():
    """Steps of loops: called as usual, as a concrete function, and one that fails."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(90, 8)).astype("float32")
    y = draw.normal(size=(90, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    specs = [tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1])]

    def step_of(model, fails=()):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
        calls = tf.Variable(0)

        @tf.function(input_signature=specs)
        def step(x, y):
            number = calls.assign_add(1)
            allowed = tf.debugging.Assert(tf.reduce_all(number != fails), ["bad step"])
            with tf.GradientTape() as tape, tf.control_dependencies([allowed]):
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        return step

    def train(name, call, fails=()):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(30, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        step = step_of(model, fails)
        call = call(step)
        failed = 0
        for _ in range(2):
            for batch in dataset:
                try:
                    call(*batch)
                except tf.errors.InvalidArgumentError:
                    failed += 1
        # Some steps look at the loss by Python, in a branch of a conditional.
        always = [op[0] for op in ops_of(step) if not BRANCH.match(op[4])]
        kinds = [kind for kind in always if "Py" in kind or "Coll" in kind]
        weights = np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
        found[name] = {"kinds": kinds, "weights": weights, "failed": failed}

    train("called", lambda step: step)
    train("concrete", lambda step: step.get_concrete_function())
    train("failing", lambda step: step, fails=(5, 6))


def rounded():
    """Two steps of a loop whose gradients are the means of rows."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(10, 1001)).astype("float32")  # No multiple of the ranks.
    x[:, 0], x[:, 1] = 0.0, 3e5  # fp16 has no such number.
    weights = keras.Variable(np.zeros(1001), dtype="float32")
    wide = keras.Variable(np.zeros(7), dtype="float64")
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weights, wide])

    @tf.function(input_signature=[tf.TensorSpec([None, 1001])])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(x, weights))
            some = tf.cast(x[:, 2:9], tf.float64)
            more = tf.reduce_mean(tf.linalg.matvec(some, wide.value))
            loss += tf.cast(more, tf.float32)
        optimizer.apply(tape.gradient(loss, [weights, wide]), [weights, wide])

    for batch in tf.data.Dataset.from_tensor_slices(np.tile(x, [2, 1])).batch(10):
        weights.assign(np.zeros(1001))
        wide.assign(np.zeros(7))
        step(batch)  # The second batch is divided.
    ops = list(ops_of(step))
    found["kinds"] = sorted({op[0] for op in ops if "Collective" in op[0]})
    found["means"] = (-weights.numpy()).tolist(), (-wide.numpy()).tolist()
    found["exact"] = x.mean(0, dtype="float64").tolist()


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


def function_in(function):
    """The tf.function in the closure of Keras's train function."""
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(one, "get_concrete_function"):
            return one
        cells = getattr(one, "__closure__", None) or ()
        waiting += [cell.cell_contents for cell in cells]
    raise AssertionError("there is no tf.function")


def ops_of(function):
    """Kind, device and instance key of each op, of all functions of the library.

    Also how many ops of the backward pass have to end before (``ops_before``), and the
    name of the function.
    """
    (concrete,) = function._list_all_concrete_functions()
    graph = concrete.graph.as_graph_def()
    functions = [(f.signature.name, f.node_def) for f in graph.library.function]
    for name, nodes in [("", graph.node), *functions]:
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
            yield [node.op, node.device, key, passed, name]


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

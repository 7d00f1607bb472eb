# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Loops that read what their steps return, decide by it, or draw numbers by numpy."""

from __future__ import annotations

import random

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import RANK, data, main, raised_by, results


def looped(after_step=None, noise=None, function=tf.function):
    """A loop that gives ``noise`` of a batch to its step, and calls ``after_step``."""
    x, y = data(60)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="last")])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)

    @function
    def step(rows, labels, added):
        with tf.GradientTape() as tape:
            outputs = model(rows + added, training=True)
            loss = tf.reduce_mean((outputs - labels) ** 2)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}

    given = tf.data.Dataset.from_tensor_slices((x, y.astype("float32")[:, None]))
    losses = []
    for _ in range(4):
        for rows, labels in given.batch(8):
            found = step(rows, labels, noise(rows) if noise else 0.0)
            losses.append([float(found["loss"]), found["norm"].numpy()])
            if after_step:
                after_step(model, optimizer, found["loss"])
    return results(model) | {"losses": np.array(losses)}


def case_eagerly_with_an_unused_weight():
    """An eager step gives its optimizer a gradient that is None."""
    x, y = data(24)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    unused = keras.Variable(np.ones(2, "float32"))
    optimizer = keras.optimizers.Adam(0.1)
    weights = [*model.trainable_variables, unused]
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y[:, None]) ** 2)
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return results(model) | {"loss": loss.numpy()}


def case_function_between_tapes():
    """A function under an eager tape, and under an eager accumulator of tangents."""
    x, y = data(24)
    x = tf.constant(x)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1)
    forward = tf.function(lambda rows: tf.tanh(model(rows)))
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - y[:, None]) ** 2)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        outputs = forward(x)
    return results(model) | {
        "loss": loss.numpy(),
        "outputs": outputs.numpy(),
        "tangents": accumulator.jvp(outputs).numpy(),
    }


def case_errors_that_a_loop_catches():
    """The rows of one rank have a wrong index; the loop leaves such batches out."""
    table = tf.Variable(np.arange(20.0).reshape(10, 2))

    @tf.function
    def step(indices, targets):
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(tf.gather(table, indices), 1)
            loss = tf.reduce_mean((found - targets) ** 2)
        table.assign_sub(0.01 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    losses = []
    for wrong in (None, 0, 11, 6, None):
        indices = np.arange(12) % 10
        if wrong is not None:
            indices[wrong] = 99
        try:
            losses.append(step(indices, np.linspace(0, 1, 12)).numpy())
        except tf.errors.InvalidArgumentError as error:
            losses.append(-1.0 if "99 is not in" in str(error) else -2.0)
    return {"losses": np.array(losses), "table": table.numpy()}


def case_rate_by_the_loss():
    """And a metric outside of the step, a sum of tensors, and a best loss."""
    outside, kept = keras.metrics.Mean(), [tf.constant(np.inf), tf.constant(0.0)]

    def decide(model, optimizer, loss):
        outside.update_state(loss)
        kept[1] += loss
        if loss < kept[0]:
            kept[0] = loss
        else:
            optimizer.learning_rate = 0.1 * float(loss)

    found = looped(decide)
    return found | {"kept": np.array([float(outside.result()), *map(float, kept)])}


def case_momentum_by_the_loss():
    """The momentum is a plain Python number; traced graphs do not see the change."""

    def decide(model, optimizer, loss):
        if int(optimizer.iterations) == 20:
            optimizer.momentum = float(loss)

    return looped(decide)


def case_weights_by_the_loss():
    def decide(model, optimizer, loss):
        if int(optimizer.iterations) == 20:
            model.layers[-1].kernel.assign_add(float(loss) * tf.ones((6, 1)))

    return looped(decide)


def case_rate_by_the_loss_eagerly():
    def decide(model, optimizer, loss):
        optimizer.learning_rate = 0.1 * float(loss)

    return looped(decide, function=lambda step: step)


def case_noise_of_numpy():
    """Of numpy's and Python's common generators, and of one of the script's own."""
    generator = np.random.default_rng(0)

    def noise(rows):
        drawn = np.random.normal(size=(len(rows), 6)) + generator.normal(size=(6,))
        return (drawn * random.random() + np.sin(rows.numpy())).astype("float32")

    return looped(noise=noise)


def case_noise_of_numpy_in_a_step():
    """In a step that is traced, it is drawn once for each trace."""

    class Noisy(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            return super().train_step((x + np.random.normal(), y * random.random()))

    x, y = data(64)
    model = Noisy([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    y = y.astype("float32")[:, None]
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_loss_averaged_by_an_eager_step():
    class Averaged(keras.Model):
        def __init__(self):
            super().__init__()
            self.out, self.average = keras.layers.Dense(1), 1.0

        def call(self, x):
            return self.out(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                self.average = 0.9 * self.average + 0.1 * float(loss)
                scaled = loss / self.average
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    x, y = data(32)
    model = Averaged()
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    return results(model, model.fit(x, y[:, None], batch_size=8, verbose=0))


def case_learned_classes():
    """Classes are sampled by how often the batches had them."""
    words = np.random.default_rng(6).integers(0, 20, (40, 1))
    weights, biases = tf.Variable(tf.ones([20, 3])), tf.Variable(tf.zeros([20]))
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(words):
        x = tf.one_hot(words[:, 0] % 3, 3)
        with tf.GradientTape() as tape:
            sampled = tf.random.learned_unigram_candidate_sampler(words, 1, 5, True, 20)
            losses = tf.nn.nce_loss(
                weights, biases, words, x, 5, 20, sampled_values=sampled
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, [weights, biases])
        optimizer.apply_gradients(zip(gradients, [weights, biases], strict=True))

    for batch in tf.data.Dataset.from_tensor_slices(words).batch(8):
        step(batch)
    return {"weights": weights.numpy(), "biases": biases.numpy()}


def case_variable_without_an_optimizer():
    """The step moves it by its gradient itself."""
    x, _ = data(42)
    weight, moved = tf.Variable(tf.ones((6, 1))), tf.Variable(tf.zeros((6,)))
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(((x + moved) @ weight - 1.0) ** 2)
        gradients = tape.gradient(loss, [weight, moved])
        optimizer.apply(gradients[:1], [weight])
        moved.assign_add(-0.01 * gradients[1])

    for batch in tf.data.Dataset.from_tensor_slices(x).batch(8):
        step(batch)
    return {"weight": weight.numpy(), "moved": moved.numpy()}


def case_one_replica():
    """A strategy of TensorFlow with one replica is harmless, also in its scope."""
    x, y = (each.astype("float32") for each in data(40))
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(x, y[:, None], verbose=0)
        batches = tf.data.Dataset.from_tensor_slices((x, y[:, None])).batch(9)
        model.fit(batches, validation_data=batches, verbose=0)
        predicted = model.predict(batches, verbose=0)
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(rows, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(rows) - labels) ** 2)
            weights = model.trainable_variables
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return loss

        losses = [strategy.run(step, args=(x, y[:, None])) for _ in range(3)]
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        other = tf.Variable(1.0)

        @tf.function
        def another(rows):
            other.assign_add(tf.reduce_mean(rows))
            return other.read_value()

        found = another(x)
    return results(model, history) | {
        "losses": np.array([float(each) for each in losses]),
        "predicted": predicted,
        "other": found.numpy(),
    }


# --- what cannot be equal to one process ----------------------------------------------


def case_higher_gradients():
    """A function is first called under a persistent tape, another under two tapes."""
    x = data(13)[0]
    weights = tf.Variable(tf.reshape(tf.linspace(-1.0, 1.0, 18), (6, 3)))

    def loss_of(rows):
        hidden = tf.nn.softmax(rows @ weights)
        return tf.reduce_mean(hidden**2) + tf.reduce_logsumexp(tf.tanh(rows @ weights))

    function, other = tf.function(loss_of), tf.function(loss_of)
    with tf.GradientTape(persistent=True) as tape:
        loss = function(tf.constant(x))
        scaled = 3.0 * loss
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            again = other(tf.constant(x))
        gradient = inner.gradient(again, weights)
        norm = tf.reduce_sum(gradient**2)
    return {
        "w": tape.gradient(loss, weights).numpy(),
        "w of scaled": tape.gradient(scaled, weights).numpy(),
        "w of norm": outer.gradient(norm, weights).numpy(),
    }


def case_unlike_batches_of_one_row():
    """Nothing is divided, and the ranks' data differ: all train on the chief's."""
    random_rows = np.random.default_rng(RANK)
    weights = tf.Variable(tf.ones(2))

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows * weights - 2.0) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    losses = [
        step(tf.constant(random_rows.random((1, 2)), tf.float32)) for _ in range(20)
    ]
    return {"w": weights.numpy(), "losses": np.array(losses)}


def case_unlike_data():
    """The data come from a random generator without a common seed."""
    x = np.random.default_rng(RANK).normal(size=(40, 6))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return results(
        model, model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
    )


# --- strategies of TensorFlow that divide the training themselves ---------------------


def case_strategies_of_clusters():
    return raised_by(tf.distribute.MultiWorkerMirroredStrategy)


def case_experimental_strategies():
    return raised_by(tf.distribute.experimental.MultiWorkerMirroredStrategy)


def case_parameter_servers():
    return raised_by(lambda: tf.distribute.ParameterServerStrategy(None))


def case_two_replicas():
    return raised_by(lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    main(globals())

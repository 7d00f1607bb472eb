# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Losses that are no mean over the rows of a batch, in steps of models and in loops."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import data, main, results


def masked_data(rows=42):
    """Rows of six numbers with targets and a mask; its number of ones varies."""
    x, y = data(rows)
    lengths = np.random.default_rng(2).integers(1, 6, rows)
    mask = (np.arange(5) < lengths[:, None]).astype("float32")
    return x, np.tile(y[:, None], 5).astype("float32"), mask


def batches(*arrays, drop_remainder=False):
    """The last batch has two rows, which may be fewer than the ranks."""
    rows = tf.data.Dataset.from_tensor_slices(arrays or masked_data())
    return rows.batch(8, drop_remainder)


def network(*extra):
    first, last = keras.layers.Dense(8, "tanh"), keras.layers.Dense(5)
    return keras.Sequential([keras.Input((6,)), first, *extra, last])


def noisy():
    """A network with layers that are random or that depend on other rows."""
    return network(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))


class Stepping(keras.Model):
    """Its step computes ``loss_of`` the network and the arrays of a batch."""

    def __init__(self, inner, loss_of):
        super().__init__()
        self.inner, self.loss_of = inner, loss_of

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.inner, *batch)
        weights = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def in_a_step(loss_of, inner=None, given=None, **kwargs):
    model = Stepping(inner or network(), loss_of)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), **kwargs)
    history = model.fit(given or batches(), epochs=2, verbose=0)
    return results(model, history)


def in_a_loop(loss_of, inner=None, given=None, function=tf.function):
    inner, optimizer = inner or network(), keras.optimizers.SGD(0.01, momentum=0.9)

    @function
    def step(*batch):
        with tf.GradientTape() as tape:
            loss = loss_of(inner, *batch)
        weights = inner.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return loss

    losses = [float(step(*batch)) for _ in range(2) for batch in given or batches()]
    return results(inner) | {"losses": np.array(losses)}


def in_both(loss_of, make=network, given=None):
    step = in_a_step(loss_of, make(), given)
    loop = in_a_loop(loss_of, make(), given)
    return step | {f"loop_{name}": value for name, value in loop.items()}


def errors_of(inner, x, y):
    return (inner(x, training=True) - y) ** 2


# --- masks, selections and comparisons of rows ----------------------------------------


def masked_mean(inner, x, y, mask):
    return tf.reduce_sum(errors_of(inner, x, y) * mask) / tf.reduce_sum(mask)


def selected(inner, x, y, mask):
    return tf.reduce_mean(tf.boolean_mask(errors_of(inner, x, y), mask > 0))


def case_mask():
    return in_both(masked_mean)


def case_mask_eagerly():
    step = in_a_step(masked_mean, run_eagerly=True)
    loop = in_a_loop(masked_mean, function=lambda step: step)
    return step | {f"loop_{name}": value for name, value in loop.items()}


def case_mask_in_each_row():
    def loss_of(inner, x, y, mask):
        errors = tf.reduce_sum(errors_of(inner, x, y) * mask, 1)
        return tf.reduce_mean(errors / tf.reduce_sum(mask, 1))

    return in_both(loss_of, noisy)


def case_mask_in_compute_loss():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def call(self, inputs):
            return self.inner(inputs[0])

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.reduce_sum((y_pred - y) ** 2 * x[1]) / tf.reduce_sum(x[1])

    x, y, mask = masked_data()
    model = Model()
    model.compile("sgd")
    return results(model, model.fit((x, mask), y, batch_size=8, verbose=0))


def case_selection():
    return in_both(selected, noisy)


def case_function_under_an_eager_tape():
    inner, optimizer = network(), keras.optimizers.SGD(0.01)
    loss_of = tf.function(lambda *batch: masked_mean(inner, *batch))
    for batch in batches():
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        weights = inner.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return results(inner)


def case_arrays():
    """The loop slices arrays, without a dataset."""
    x, y, mask = masked_data(40)
    slices = [slice(start, start + 8) for start in range(0, 40, 8)]
    given = [tuple(tf.constant(each[rows]) for each in (x, y, mask)) for rows in slices]
    return in_a_loop(masked_mean, given=given)


def case_halves():
    """The labels of the second half do not count."""

    def loss_of(inner, x, y, _):
        outputs, half = inner(x, training=True), tf.shape(y)[0] // 2
        labelled = tf.reduce_mean(tf.square(outputs[:half] - y[:half]))
        return labelled + 0.3 * tf.reduce_mean(tf.square(outputs[half:]))

    return in_both(loss_of)


def case_detached_ratio():
    """Its value is a mean over rows, but its gradient has the ratio of the batch."""

    def loss_of(inner, x, y, _):
        outputs = inner(x, training=True)
        one = tf.reduce_mean(tf.square(outputs - y))
        other = tf.reduce_mean(tf.abs(outputs[:, 0] - x[:, 0]))
        return one + tf.stop_gradient(one / other) * other

    return in_both(loss_of)


def case_similarities():
    """A contrastive loss that compares each row with all others."""

    def loss_of(inner, x, *_):
        logits = tf.matmul(inner(x), inner(0.9 * x), transpose_b=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(tf.shape(x)[0]), logits
        )
        return tf.reduce_mean(losses)

    return in_both(loss_of)


def case_shuffled_rows():
    """A step that mixes each row with another one of its batch."""

    def loss_of(inner, x, y, _):
        return tf.reduce_mean(errors_of(inner, x + tf.random.shuffle(x), y))

    return in_a_loop(loss_of)


def case_noise():
    """Random numbers belong to places in the batch."""

    def loss_of(inner, x, y, _):
        noise = keras.random.normal(tf.shape(x), seed=3)
        return tf.reduce_mean(errors_of(inner, x + noise, y))

    return in_both(loss_of)


def fit_with(loss):
    x, y, mask = masked_data()
    model = network()
    model.compile("sgd", loss)
    targets = np.where(mask > 0, y, np.nan).astype("float32")
    return results(model, model.fit(x, targets, batch_size=8, verbose=0))


def without_missing(y_true, y_pred):
    there = ~tf.math.is_nan(y_true)
    errors = tf.where(there, y_pred - tf.where(there, y_true, 0.0), 0.0) ** 2
    return errors, tf.cast(there, tf.float32)


def case_missing_targets():
    def loss(y_true, y_pred):
        errors, there = without_missing(y_true, y_pred)
        return tf.reduce_sum(errors) / tf.reduce_sum(there)

    return fit_with(loss)


def case_divided_by_the_largest():
    """A loss per row, each divided by the largest one of the batch."""

    def loss(y_true, y_pred):
        errors = tf.reduce_mean(without_missing(y_true, y_pred)[0], -1)
        return errors / tf.stop_gradient(tf.reduce_max(errors))

    return fit_with(loss)


# --- sums -----------------------------------------------------------------------------


def summed(inner, x, y, *_):
    return tf.reduce_sum(errors_of(inner, x, y)) / 8.0


def case_sum_of_squares():
    return in_both(summed)


def case_sum_with_dropout():
    return in_both(summed, noisy)


def case_sum_and_mean():
    def loss_of(inner, x, y, _):
        errors = errors_of(inner, x, y)
        return tf.reduce_mean(errors) + 0.1 * tf.reduce_sum(errors)

    return in_both(loss_of)


def case_sum_by_the_rows():
    """Divided by the number of rows, as a tensor and as a constant."""

    def loss_of(inner, x, y, _):
        errors = errors_of(inner, x, y)
        rows = tf.cast(tf.shape(errors)[0], tf.float32)
        return tf.reduce_sum(errors) / rows + tf.reduce_sum(errors) / errors.shape[0]

    return in_both(loss_of, given=batches(drop_remainder=True))


def case_sum_of_unknown_batches():
    """The number of batches is not known in advance."""
    return in_a_loop(summed, given=batches().filter(lambda *batch: True))


def case_sum_of_keras():
    return fit_with(lambda y, p: keras.ops.sum(without_missing(y, p)[0]))


def dense(x):
    if isinstance(x, tf.RaggedTensor):
        x = x.to_tensor(shape=(None, 6))
    return tf.ensure_shape(
        tf.sparse.to_dense(x) if hasattr(x, "indices") else x, (None, 6)
    )


def case_sum_of_ragged_and_sparse():
    x, y, _ = masked_data(40)
    ragged = tf.RaggedTensor.from_row_lengths(x.reshape(-1)[:60], [1, 2] * 20)
    sparse = tf.sparse.from_dense(np.where(x > 0, x, 0))
    found: dict[str, Any] = {}
    for name, rows in (("ragged", ragged), ("sparse", sparse)):
        inner = network()
        given = tf.data.Dataset.from_tensor_slices((rows, y)).batch(8)
        loop = in_a_loop(lambda inner, x, y: summed(inner, dense(x), y), inner, given)
        found |= {f"{name}_{key}": value for key, value in loop.items()}
    return found


def case_sum_over_embeddings():
    """All gradients are sparse."""
    words = np.random.default_rng(0).integers(0, 20, (42, 3))
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(20, 1)])
    targets = words[..., None].astype("float32") / 20
    return in_both(summed, lambda: inner, batches(words, targets))


def case_sum_in_every_other_step():
    """Adds up the gradients of two steps in variables that the first step creates."""

    class Accumulating(Stepping):
        sums: Any = ()

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = self.loss_of(self.inner, *batch)
            weights = self.inner.trainable_variables
            if not self.sums:
                self.sums = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
                self.steps = tf.Variable(0)
            gradients = tape.gradient(loss, weights)
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign_add(gradient)

            def apply():
                self.optimizer.apply([tf.identity(each) for each in self.sums], weights)
                for total in self.sums:
                    total.assign(tf.zeros_like(total))
                return True

            tf.cond(self.steps.assign_add(1) % 2 == 0, apply, lambda: False)
            return {"loss": loss}

    model = Accumulating(network(), summed)
    model.compile("sgd")
    return results(model, model.fit(batches(), epochs=2, verbose=0))


# --- gradients of gradients, and by ``tf.gradients`` ----------------------------------


def case_moved_weights():
    """One step of MAML on the whole batch."""
    kernel, bias = tf.Variable(tf.ones([6, 5])), tf.Variable(tf.zeros([5]))
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, _):
        def loss_of(kernel, bias):
            return tf.reduce_mean((x @ kernel + bias - y) ** 2)

        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = loss_of(kernel, bias)
            found = inner.gradient(loss, [kernel, bias])
            loss = loss_of(kernel - 0.1 * found[0], bias - 0.1 * found[1])
        gradients = outer.gradient(loss, [kernel, bias])
        optimizer.apply_gradients(zip(gradients, [kernel, bias], strict=True))

    for batch in batches():
        step(*batch)
    return {"kernel": kernel.numpy(), "bias": bias.numpy()}


def case_moved_rows():
    """Trains on rows moved along the gradient of a number that is no mean or sum."""

    def loss_of(inner, x, y, _):
        with tf.GradientTape() as tape:
            tape.watch(x)
            number = tf.sqrt(tf.reduce_mean(inner(x) ** 2))
        return tf.reduce_mean(errors_of(inner, x + tape.gradient(number, x), y))

    return in_both(loss_of)


def case_clipped_gradients_of_a_graph():
    inner, optimizer = network(), keras.optimizers.SGD(0.1)

    @tf.function
    def step(x, y, _):
        loss = tf.reduce_mean(errors_of(inner, x, y))
        weights = inner.trainable_variables
        gradients = tf.gradients(loss, [weight.value for weight in weights])
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply(gradients, weights)

    for batch in batches():
        step(*batch)
    return results(inner)


def case_adversary():
    """A GAN with two tapes, noise and a gradient penalty."""
    generator, critic = (
        network(),
        keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        ),
    )
    one, two = keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, _):
        noise = tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            made = generator(noise, training=True)
            share = tf.random.uniform((tf.shape(x)[0], 1))
            between = share * y + (1.0 - share) * made
            with tf.GradientTape() as inner:
                inner.watch(between)
                judged = critic(between)
            slopes = inner.gradient(judged, between)
            penalty = tf.reduce_mean((tf.norm(slopes + 1e-3, axis=1) - 1.0) ** 2)
            loss = tf.reduce_mean(critic(made)) - tf.reduce_mean(critic(y))
            loss += 10.0 * penalty
        weights = critic.trainable_variables
        one.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise, training=True)))
        weights = generator.trainable_variables
        two.apply(tape.gradient(loss, weights), weights)

    for batch in batches():
        step(*batch)
    return results(generator) | {
        f"critic{i}": weight for i, weight in enumerate(critic.get_weights())
    }


if __name__ == "__main__":
    main(globals())

# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Custom steps and loops whose gradients grow with the number of rows, or do not."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import data, main, raised_by


class Stepping(keras.Sequential):
    """A custom training step whose loss is ``reduce`` of the squared errors."""

    def __init__(self, reduce, **kwargs):
        super().__init__(**kwargs)
        self.reduce = reduce

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.reduce((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def stepping(reduce, rows=42, kind=Stepping, dropout=0.0, **kwargs):
    """With 42 rows the last batch is smaller: the graph takes any number of rows."""
    x, y = data(rows)
    model = kind(reduce, layers=dropping(dropout))
    model.compile("sgd", **kwargs)
    return lambda: model.fit(
        x, y.astype("float32")[:, None], batch_size=8, epochs=2, verbose=0
    )


def dropping(rate):
    return [
        keras.Input((6,)),
        keras.layers.Dense(8, "relu"),
        keras.layers.Dropout(rate),
        keras.layers.Dense(8, "relu"),
        # SpatialDropout1D takes rows of vectors.
        keras.layers.Reshape((4, 2)),
        keras.layers.SpatialDropout1D(rate),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]


def case_step_that_sums():
    return raised_by(stepping(lambda error: tf.reduce_sum(error) / 8.0))


def case_step_that_sums_eagerly():
    return raised_by(stepping(tf.reduce_sum, run_eagerly=True))


def case_step_that_sums_equal_batches():
    """All batches have eight rows, so the step is traced for that size only."""
    return raised_by(stepping(lambda error: tf.reduce_sum(error) / 8.0, rows=40))


def case_step_that_sums_with_dropout():
    return raised_by(stepping(tf.reduce_sum, dropout=0.4))


def case_step_that_sums_equal_batches_with_dropout():
    return raised_by(stepping(tf.reduce_sum, rows=40, dropout=0.4))


def case_step_that_sums_eagerly_with_dropout():
    return raised_by(stepping(tf.reduce_sum, dropout=0.4, run_eagerly=True))


def case_step_of_a_mean():
    return raised_by(stepping(tf.reduce_mean))


def case_step_of_a_mean_with_dropout():
    return raised_by(stepping(tf.reduce_mean, dropout=0.4))


def case_step_of_a_sum_that_is_divided():
    """Divided by the batch size for which the step is traced: a mean on every rank."""

    def reduce(error):
        return tf.reduce_sum(error) / error.shape[0]

    return raised_by(stepping(reduce, rows=40))


class Accumulating(Stepping):
    """Adds up the gradients of two steps in variables that the first step creates."""

    def __init__(self, reduce, **kwargs):
        super().__init__(reduce, **kwargs)
        self.sums = []

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.reduce((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        if not self.sums:
            self.sums = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
            self.steps = tf.Variable(0)
        for total, gradient in zip(
            self.sums, tape.gradient(loss, weights), strict=True
        ):
            total.assign_add(gradient)

        def apply():
            self.optimizer.apply([tf.identity(total) for total in self.sums], weights)
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            return True

        tf.cond(self.steps.assign_add(1) % 2 == 0, apply, lambda: False)
        return {"loss": loss}


def case_step_that_sums_in_every_other():
    return raised_by(stepping(tf.reduce_sum, rows=40, kind=Accumulating))


class Losing(keras.Sequential):
    """A custom ``compute_loss`` in Keras's own step."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return tf.reduce_sum((y_pred - y) ** 2) / 8.0


def case_step_whose_loss_sums():
    x, y = data(40)
    model = Losing([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd")
    return raised_by(
        lambda: model.fit(x, y.astype("float32")[:, None], batch_size=8, verbose=0)
    )


def ragged(x):
    return tf.RaggedTensor.from_row_lengths(x.reshape(-1)[:60], [1, 2] * 20)


def sparse(x):
    return tf.sparse.from_dense(np.where(x > 0, x, 0))


def dense(x):
    """Convert to a dense tensor with six numbers per row."""
    if isinstance(x, tf.RaggedTensor):
        x = x.to_tensor(shape=(None, 6))
    elif isinstance(x, tf.SparseTensor):
        x = tf.sparse.to_dense(x)
    return tf.ensure_shape(x, (None, 6))


class Bags(keras.Model):
    """Takes ragged or sparse rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.dense(dense(x)) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def bagging(of_rows, **kwargs):
    x, y = data(40)
    model = Bags()
    model.compile("sgd", **kwargs)
    rows = tf.data.Dataset.from_tensor_slices(
        (of_rows(x), y.astype("float32")[:, None])
    )
    batches = rows.batch(8, drop_remainder=kwargs.get("run_eagerly", False))
    return lambda: model.fit(batches, verbose=0)


def case_step_that_sums_ragged():
    return raised_by(bagging(ragged))


def case_step_that_sums_sparse():
    return raised_by(bagging(sparse))


def case_step_that_sums_sparse_eagerly():
    return raised_by(bagging(sparse, run_eagerly=True))


def case_step_that_sums_over_embeddings():
    """All gradients are sparse."""
    words = np.random.default_rng(0).integers(0, 20, (40, 3))
    model = Stepping(
        tf.reduce_sum, layers=[keras.Input((3,)), keras.layers.Embedding(20, 1)]
    )
    model.compile("sgd")
    return raised_by(
        lambda: model.fit(words, words[..., None] / 20.0, batch_size=8, verbose=0)
    )


def looping(
    reduce,
    function=tf.function,
    name=None,
    of_rows=np.asarray,
    dropout=0.0,
    through=lambda batches: batches,
):
    x, y = data(40)
    model = keras.Sequential(dropping(dropout))
    optimizer = keras.optimizers.SGD(0.001, name=name)

    @function
    def step(x, y):
        x = dense(x)
        with tf.GradientTape() as tape:
            loss = reduce((model(x, training=True) - y) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )

    def loop():
        batches = tf.data.Dataset.from_tensor_slices(
            (of_rows(x), y.astype("float32")[:, None])
        ).batch(8, drop_remainder=True)
        for _ in range(2):
            for batch in through(batches):
                step(*batch)

    return loop


def case_loop_that_sums():
    return raised_by(looping(lambda error: tf.reduce_sum(error) / 8.0))


def case_loop_that_sums_eagerly():
    return raised_by(looping(tf.reduce_sum, lambda step: step))


def case_loop_that_sums_with_dropout():
    return raised_by(looping(tf.reduce_sum, dropout=0.4))


def case_loop_that_sums_eagerly_with_dropout():
    return raised_by(looping(tf.reduce_sum, lambda step: step, dropout=0.4))


def case_loop_of_a_mean_with_dropout():
    return raised_by(looping(tf.reduce_mean, dropout=0.4))


def case_loop_that_sums_unknown_batches():
    """The number of batches is not known in advance."""

    def through(batches):
        return batches.filter(lambda *batch: True)

    return raised_by(looping(tf.reduce_sum, through=through))


def case_second_loop_that_sums():
    """The second loop has another optimizer with the same name as the first one's."""

    def loops():
        looping(tf.reduce_mean, name="descent")()
        looping(tf.reduce_sum, name="descent")()

    return raised_by(loops)


def case_loop_that_sums_ragged():
    return raised_by(looping(tf.reduce_sum, of_rows=ragged))


def case_loop_that_sums_sparse():
    return raised_by(looping(tf.reduce_sum, of_rows=sparse))


def case_loop_that_sums_a_part():
    return raised_by(
        looping(
            lambda error: tf.reduce_mean(error) + 0.1 * tf.reduce_sum(error),
            name="partial",
        )
    )


def case_loop_of_sums_that_are_divided():
    """Divided by the actual number of rows, or by Keras: a mean on every rank."""
    total = keras.losses.MeanSquaredError(reduction="sum")

    def reduce(error):
        rows = tf.cast(tf.shape(error)[0], tf.float32)
        whole = total(error, tf.zeros_like(error)) / 8.0
        return tf.reduce_sum(error) / rows + whole

    return raised_by(looping(reduce))


if __name__ == "__main__":
    main(globals())

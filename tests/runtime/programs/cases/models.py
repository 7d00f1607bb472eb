# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Models and layers of many kinds."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import (
    EPOCHS,
    ROWS,
    classifier,
    compiled,
    data,
    main,
    results,
)


def case_embedding():
    generator = np.random.default_rng(3)
    x = generator.integers(0, 50, size=(45, 5))
    y = generator.integers(0, 2, size=45)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(50, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
    compiled(model, optimizer)
    return results(model, model.fit(x, y, batch_size=11, epochs=2, verbose=0))


class Positions(keras.layers.Layer):
    """Adds an embedding of the positions in a row, as transformers do."""

    def __init__(self, most, width, in_each_row=False):
        super().__init__()
        self.positions = keras.layers.Embedding(most, width)
        self.in_each_row = in_each_row

    def call(self, x):
        shape = keras.ops.shape(x)
        positions = keras.ops.arange(shape[1])
        if self.in_each_row:
            positions = keras.ops.broadcast_to(positions, shape[:2])
        return x + self.positions(positions)


def trained_with_positions(optimizer, length=5, batch=11, in_each_row=False, **kwargs):
    generator = np.random.default_rng(3)
    x = generator.integers(0, 50, size=(45, 5))
    y = generator.integers(0, 2, size=45)
    model = keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            keras.layers.Embedding(50, 4),
            Positions(7, 4, in_each_row),
            keras.layers.GlobalMaxPooling1D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, optimizer, **kwargs)
    return results(model, model.fit(x, y, batch_size=batch, epochs=2, verbose=0))


def each_of(optimizers, **kwargs):
    found = {}
    for number, optimizer in enumerate(optimizers):
        keras.utils.set_random_seed(2)
        for key, value in trained_with_positions(optimizer, **kwargs).items():
            found[f"{key}_{number}"] = value
    return found


def case_positions():
    """On one machine, each position has one slice, whatever the number of rows."""
    return each_of(
        [
            keras.optimizers.Adam(0.01),
            keras.optimizers.Adagrad(0.05),
            keras.optimizers.RMSprop(0.01),
            keras.optimizers.Adam(0.01, clipnorm=0.02),
        ]
    )


def case_positions_eagerly():
    return each_of([keras.optimizers.Adam(0.01)], run_eagerly=True)


def case_positions_of_any_length():
    """The graph computes the length; one rank has no row of the last batch."""
    return each_of([keras.optimizers.Adam(0.01)], length=None, batch=4)


def case_positions_in_each_row():
    """Each row has slices of its own, though all ranks have the same indices."""
    found = each_of([keras.optimizers.Adam(0.01)], batch=12, in_each_row=True)
    eagerly = each_of(
        [keras.optimizers.Adam(0.01)], batch=12, in_each_row=True, run_eagerly=True
    )
    return found | {f"{key}_eagerly": value for key, value in eagerly.items()}


def case_positions_in_inner_functions():
    """A step whose model is called in a function of the program."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.positions = Positions(7, 6)
            self.last = keras.layers.Dense(2, activation="softmax")

        @tf.function
        def transformed(self, x):
            return self.positions(x[:, None] * tf.ones([1, 5, 1]))

        def call(self, x):
            return self.last(keras.ops.max(self.transformed(x), axis=1))

    x, y = data()
    model = Model()
    model(x)
    compiled(model, keras.optimizers.Adam(0.01))
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_segments():
    """Each row looks up the same index, and has a slice of its own.

    Ranks that have one row each, as in the last batch, can tell in a graph only.
    """

    class Segments(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.segments = keras.layers.Embedding(2, 6)

        def call(self, inputs):
            x, segments = inputs
            return x + self.segments(segments)

    inputs = [keras.Input((6,)), keras.Input((), dtype="int32")]
    hidden = keras.layers.Dense(8, activation="tanh")(Segments()(inputs))
    outputs = keras.layers.Dense(2, activation="softmax")(hidden)
    found = {}
    for eagerly in (False, True):
        keras.utils.set_random_seed(2)
        model = keras.Model(inputs, outputs)
        compiled(model, keras.optimizers.Adam(0.01), run_eagerly=eagerly)
        x, y = data(48 if eagerly else 50)
        segments = np.zeros(len(x), "int32")
        history = model.fit([x, segments], y, batch_size=16, epochs=2, verbose=0)
        for key, value in results(model, history).items():
            found[f"{key}_eagerly" if eagerly else key] = value
    return found


def case_wide():
    """Matrices that are large for the few rows of a rank."""
    wide = [keras.layers.Dense(520, activation="tanh") for _ in range(2)]
    model = compiled(classifier(*wide))
    return results(model, model.fit(*data(), batch_size=16, epochs=2, verbose=0))


def case_structures():
    """Dictionaries and ragged and sparse tensors are also divided by rows."""
    x, y = data(30)
    ragged = tf.RaggedTensor.from_row_lengths(
        np.arange(60, dtype="int32") % 9, [i % 5 for i in range(30)]
    )
    sparse = tf.sparse.from_dense(np.where(x > 0, x, 0))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2, activation="softmax")

        def call(self, inputs):
            lengths = tf.cast(inputs["ragged"].row_lengths(), self.dtype)[:, None]
            dense = tf.ensure_shape(tf.sparse.to_dense(inputs["sparse"]), (None, 6))
            return self.out(tf.concat([inputs["x"], lengths, dense], 1))

    dataset = tf.data.Dataset.from_tensor_slices(
        ({"x": x, "ragged": ragged, "sparse": sparse}, y)
    ).batch(7)
    model = compiled(Model())
    return results(model, model.fit(dataset, epochs=2, verbose=0))


def case_batch_normalization():
    x, y = data()
    norm = keras.layers.BatchNormalization()
    # Not Adam: the bias before the layer has no gradient but rounding errors.
    model = compiled(classifier(norm), keras.optimizers.SGD(0.03))
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    found = results(model, history)
    norm = next(
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    )
    found["moving_mean"] = norm.moving_mean.numpy()
    found["moving_variance"] = norm.moving_variance.numpy()
    return found


def case_batch_normalization_synchronized():
    """The statistics are of all ranks' rows, also on sequences with a mask."""
    x, y = sequences()
    inputs = keras.Input((9,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    hidden = keras.layers.GRU(4)(hidden)
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(hidden))
    compiled(model, keras.optimizers.SGD(0.03))
    history = model.fit(x, y, batch_size=16, epochs=EPOCHS, shuffle=False, verbose=0)
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, y, 11, verbose=0))
    return found


def case_batch_normalization_of_all_rows():
    x, y = data()
    norm = keras.layers.BatchNormalization(synchronized=True)
    model = compiled(classifier(norm), keras.optimizers.SGD(0.03))
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, y, 11, verbose=0))
    return found


def case_dropout():
    x, y = data()
    model = compiled(classifier(keras.layers.Dropout(0.5)))
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_random_layers():
    """Noise and dropout of many shapes: also masks shared by steps, units or rows."""
    x, y = data()
    inputs = keras.Input(x.shape[1:])
    hidden = keras.layers.GaussianNoise(0.1)(inputs)
    hidden = keras.layers.Dense(12, activation="tanh")(hidden)
    hidden = keras.layers.GaussianDropout(0.2)(hidden)
    hidden = keras.layers.Dropout(0.3, noise_shape=(1, 12))(hidden)
    hidden = keras.layers.Reshape((3, 4))(hidden)
    hidden = keras.layers.SpatialDropout1D(0.3)(hidden)
    # Without biases: that of the keys has no gradient but rounding errors.
    attention = keras.layers.MultiHeadAttention(2, 2, dropout=0.3, use_bias=False)
    hidden = attention(hidden, hidden)
    hidden = keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2)(hidden)
    hidden = keras.layers.AlphaDropout(0.1)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(hidden))
    compiled(model, keras.optimizers.SGD(0.05))
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_augmentation():
    generator = np.random.default_rng(5)
    images = generator.uniform(size=(45, 8, 8, 1)).astype("float32")
    labels = generator.integers(0, 2, size=45)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.RandomFlip(),
            keras.layers.RandomTranslation(0.1, 0.1),
            keras.layers.RandomRotation(0.1),
            keras.layers.RandomContrast(0.2),
            keras.layers.Conv2D(4, 3),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.SGD(0.05))
    return results(model, model.fit(images, labels, batch_size=11, epochs=2, verbose=0))


class Autoencoder(keras.Model):
    """A variational autoencoder, with noise of both of Keras and TensorFlow."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(8)
        self.decoder = keras.layers.Dense(6)
        self.seeds = keras.random.SeedGenerator(11)

    def call(self, inputs):
        mean, log_variance = keras.ops.split(self.encoder(inputs), 2, axis=-1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        more = tf.random.stateless_truncated_normal(tf.shape(mean), [3, 4])
        # Two draws for each row, in one dimension.
        pairs = tf.random.stateless_uniform([2 * tf.shape(mean)[0]], [5, 6])
        scale = tf.reduce_mean(tf.reshape(pairs, [-1, 2]), 1, keepdims=True)
        hidden = mean + keras.ops.exp(0.5 * log_variance) * (noise + 0.1 * more) * scale
        return self.decoder(hidden)


def case_autoencoder():
    x, _ = data()
    model = Autoencoder()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return results(model, model.fit(x, x, batch_size=16, epochs=2, verbose=0))


def case_drawing_with_a_state():
    """Layers that call TensorFlow's random ops and not Keras's."""

    class Noisy(keras.layers.Layer):
        def call(self, inputs, training=False):
            if not training:
                return inputs
            noise = tf.random.normal(tf.shape(inputs), stddev=0.1)
            scale = tf.random.uniform((tf.shape(inputs)[0], 1), 0.8, 1.2)
            return tf.nn.dropout(inputs * tf.cast(scale, inputs.dtype), 0.3) + tf.cast(
                noise, inputs.dtype
            )

    tf.random.set_seed(5)
    x, y = data()
    model = compiled(classifier(Noisy()))
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


class Denoises(keras.Sequential):
    """Has a step of its own, which draws with an op that keeps its state."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            noise = tf.random.normal(tf.shape(x), stddev=0.2)
            counts = tf.random.poisson([], tf.abs(x))
            kept = tf.random.categorical(tf.zeros([tf.shape(x)[0], 2]), 6)
            noise += 0.1 * counts * tf.cast(kept, x.dtype)
            noise += tf.random.uniform(()) + tf.random.normal((6,))
            for _ in range(2):
                noise += 0.2 * tf.random.normal(tf.shape(x), seed=1)
            noise *= 1 + tf.cast(tf.random.categorical([[0.0, 1.0]], 1), x.dtype)
            loss = self.compute_loss(x, y, self(x + noise, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_custom_step_that_draws_with_a_state():
    """Traces of other shapes continue its numbers."""
    x, y = data()
    model = Denoises(classifier().layers)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    found: dict[str, np.ndarray] = {}
    for epochs in (2, 1):
        history = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0)
        found |= {f"history_{epochs}": np.array(history.history["loss"])}
    return results(model) | found


class CallsFunctions(Denoises):
    """Its step calls functions that draw, one of them twice.

    Each call draws the same numbers, as TensorFlow inlines both.
    """

    @tf.function
    def moved(self, x):
        scale = tf.random.uniform((tf.shape(x)[0], 1), 0.5, 1.5)
        return x * tf.cast(scale, x.dtype) + 0.2 * tf.random.normal(tf.shape(x))

    @tf.function
    def loss_of(self, x, y):
        return self.compute_loss(x, y, self(x, training=True))

    def train_step(self, data):
        x, y = data
        counts = tf.random.uniform(tf.shape(x)[:1], 0, 9, tf.int32)
        with tf.GradientTape() as tape:
            moved = self.moved(x) + self.moved(tf.sin(x))
            moved *= 0.1 * tf.cast(counts, x.dtype)[:, None]
            loss = self.loss_of(moved, y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_custom_step_that_calls_functions():
    """Its first trace, which builds the optimizer, is discarded by TensorFlow."""
    x, y = data()
    model = CallsFunctions(classifier(keras.layers.Dropout(0.3)).layers)
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


class DrawsColumns(keras.Sequential):
    """Draws 12 columns for the whole batch, and two numbers for each of its rows."""

    def train_step(self, data):
        x, y = data
        columns = tf.random.uniform([12], 0, 6, tf.int32)
        factors = tf.reshape(tf.random.uniform([2 * x.shape[0]]), [-1, 2])
        kept = tf.reduce_sum(tf.one_hot(columns, 6, dtype=x.dtype), 0)
        with tf.GradientTape() as tape:
            added = tf.reduce_sum(tf.cast(factors, x.dtype), 1, keepdims=True)
            loss = self.compute_loss(x, y, self(x * kept + added, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_custom_step_that_draws_a_fixed_number():
    """The batches have a known size, of which the fixed number is a multiple."""
    dataset = tf.data.Dataset.from_tensor_slices(data())
    model = DrawsColumns(classifier().layers)
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    dataset = dataset.batch(12, drop_remainder=True)
    return results(model, model.fit(dataset, epochs=3, verbose=0))


def case_random_layers_eagerly():
    x, y = data()
    layers = [keras.layers.GaussianNoise(0.1), keras.layers.Dropout(0.4)]
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5), *layers, keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, run_eagerly=True)
    return results(model, model.fit(x, y, batch_size=16, epochs=1, verbose=0))


def case_eager():
    x, y = data()
    model = compiled(classifier(), run_eagerly=True)
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_several_steps_per_execution():
    x, y = data()
    model = compiled(classifier(), steps_per_execution=3)
    return results(model, model.fit(x, y, batch_size=8, epochs=2, verbose=0))


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(2)
        self.tracker = keras.metrics.Mean("my_loss")

    def call(self, x):
        return self.out(self.hidden(x))

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, self(x, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        self.tracker.update_state(losses)
        return {"my_loss": self.tracker.result()}


def case_own_train_step():
    x, y = data()
    model = OwnStep()
    model.compile(keras.optimizers.Adam(0.01))
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


class Accumulates(keras.Model):
    """Adds up gradients in variables, and applies these to the optimizer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = tf.Variable(0, trainable=False)
        self.sums = [
            tf.Variable(tf.zeros_like(variable.value), trainable=False)
            for variable in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        tf.cond(self.steps % 3 == 0, self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self):
        pairs = zip(self.sums, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def case_custom_step_that_accumulates():
    x, y = data()
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = keras.layers.Dense(2, activation="softmax")(hidden)
    model = Accumulates(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


class OwnLogs(OwnStep):
    def train_step(self, data):
        super().train_step(data)
        x, y = data
        loss = keras.losses.sparse_categorical_crossentropy(
            y, self(x), from_logits=True
        )
        return {"last": tf.reduce_mean(loss)}


def case_own_logs():
    x, y = data()
    model = OwnLogs()
    model.compile(keras.optimizers.Adam(0.01))
    return results(model, model.fit(x, y, batch_size=20, epochs=2, verbose=0))


def case_functional():
    """Two inputs, two outputs, two losses with weights."""
    x, y = data(ROWS)
    one, two = keras.Input((6,), name="one"), keras.Input((3,), name="two")
    hidden = keras.layers.Dense(7, activation="tanh")(one)
    both = keras.layers.Concatenate()([hidden, two])
    label = keras.layers.Dense(2, activation="softmax", name="label")(both)
    size = keras.layers.Dense(1, name="size")(both)
    model = keras.Model([one, two], {"label": label, "size": size})
    model.compile(
        keras.optimizers.Adam(0.003),
        {"label": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"label": 1.0, "size": 0.3},
        metrics={"label": ["accuracy"], "size": ["mae"]},
    )
    inputs = {"one": x, "two": x[:, :3] ** 2}
    targets = {"label": y, "size": x.sum(1)}
    history = model.fit(
        inputs, targets, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(inputs, targets, 7, verbose=0))
    predicted = model.predict(inputs, batch_size=7, verbose=0)
    return {**found, "label": predicted["label"], "size": predicted["size"]}


def sequences():
    """Sequences of 1 to 9 words, padded with zeros."""
    generator = np.random.default_rng(5)
    x = generator.integers(1, 20, size=(ROWS, 9))
    lengths = generator.integers(1, 10, size=ROWS)
    x[np.arange(9) >= lengths[:, None]] = 0
    return x, (x[:, 0] > 9).astype("int32")


def case_lstm_masked():
    """Classifies sequences of different lengths; the LSTM consumes the mask."""
    x, y = sequences()
    model = keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.LSTM(5),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.Adam(0.005))
    return results(model, model.fit(x, y, batch_size=16, epochs=EPOCHS, verbose=0))


def case_gru_tags():
    """Labels every word, so that the mask reaches the loss and the metrics."""
    x, _ = sequences()
    model = keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True)),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.Adam(0.005))
    history = model.fit(
        x, x % 2, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, x % 2, 11, verbose=0))
    return found


def case_frozen():
    """A frozen layer, and a layer whose output is not in the loss."""
    x, y = data(ROWS)
    inputs = keras.Input((6,))
    frozen = keras.layers.Dense(6, activation="tanh", trainable=False)
    unused = keras.layers.Dense(3)
    hidden = frozen(inputs)
    label = keras.layers.Dense(2, activation="softmax")(hidden)
    model = keras.Model(inputs, [label, unused(hidden)])
    model.compile("adam", ["sparse_categorical_crossentropy", None])
    first = results(model, model.fit(x, [y, y], 16, EPOCHS, verbose=0))
    # Unfreeze it, as in fine-tuning.
    frozen.trainable = True
    compiled_again = keras.optimizers.Adam(0.001)
    model.compile(compiled_again, ["sparse_categorical_crossentropy", None])
    model.fit(x, [y, y], 16, 2, verbose=0)
    return first | {f"thawed_{k}": v for k, v in results(model).items()}


def case_convolution():
    generator = np.random.default_rng(2)
    x = generator.normal(size=(30, 6, 6, 1)).astype("float32")
    y = (x.mean((1, 2, 3)) > 0).astype("int32")
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.SGD(0.01))
    return results(model, model.fit(x, y, batch_size=7, epochs=10, verbose=0))


def case_attention():
    x, y = sequences()
    inputs = keras.Input((9,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    hidden = keras.layers.MultiHeadAttention(2, 2, use_bias=False)(hidden, hidden)
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(hidden))
    compiled(model, keras.optimizers.Adam(0.005))
    return results(model, model.fit(x, y, batch_size=16, epochs=EPOCHS, verbose=0))


def case_compiled_by_xla():
    """XLA draws other numbers for Dropout than TensorFlow, so it has to compile it."""
    x, y = data()
    model = compiled(classifier(keras.layers.Dropout(0.5)), jit_compile=True)
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_built_in_the_first_step():
    """The model has no input shape, so the first trace creates its variables."""
    generator = np.random.default_rng(5)
    x = generator.integers(0, 50, size=(45, 5))
    y = generator.integers(0, 2, size=45)
    model = keras.Sequential(
        [
            keras.layers.Embedding(50, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.Adam(0.01, global_clipnorm=1.0))
    return results(model, model.fit(x, y, batch_size=11, epochs=2, verbose=0))


def case_convolutions_compiled_by_xla():
    """XLA compiles what lies before, between and after exchanges of statistics."""
    generator = np.random.default_rng(2)
    x = generator.normal(size=(33, 8, 8, 3)).astype("float32")
    y = (x.mean((1, 2, 3)) > 0).astype("int32")
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.3),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.SGD(0.05), jit_compile=True)
    return results(model, model.fit(x, y, batch_size=12, epochs=3, verbose=0))


if __name__ == "__main__":
    main(globals())

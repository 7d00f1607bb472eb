# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Training that the program itself distributes, compared with one process."""

import copy
import random

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as hvd
from tests.runtime.programs import checks
from tests.runtime.programs.api_data import exchanges, refuses
from tests.runtime.programs.checks import RANK, SIZE
from tfcluster.runtime.scripts import program_kind

ROWS = 4
DRAWN = random.random()
hvd.init()
generator = np.random.default_rng(11)
X = generator.normal(size=(SIZE * ROWS * 4, 6))
Y = (X @ generator.normal(size=(6, 1)) > 0).astype("float64")


def batches(whole):
    """The rows of each step, either of all ranks or of this rank."""
    for start in range(0, len(X), SIZE * ROWS):
        if whole:
            yield X[start : start + SIZE * ROWS], Y[start : start + SIZE * ROWS]
        else:
            own = start + RANK * ROWS
            yield X[own : own + ROWS], Y[own : own + ROWS]


def network(dtype="float64"):
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "averaged": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


def by_loop(optimizer, whole, graph, tape=None):
    model = network()

    def step(x, y):
        with tf.GradientTape() as recorded:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        if tape:
            recorded = tape(recorded)
        gradients = recorded.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    act = tf.function(step) if graph else step
    for x, y in batches(whole):
        act(tf.constant(x), tf.constant(y))
    return model.get_weights()


def close(found, expected, tolerance=1e-9):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


def check_claimed_from_the_text():
    assert program_kind.distributes_itself()
    assert not hasattr(keras.optimizers.Optimizer.apply, "__wrapped__")


def check_ranks_draw_numbers_of_their_own():
    rows = tf.data.Dataset.range(1 << 20).shuffle(1 << 20)
    drawn = hvd.allgather_object((DRAWN, int(next(iter(rows)))))
    assert len(set(drawn)) == SIZE
    assert len({number for number, _ in drawn}) == SIZE


def check_optimizer_class_and_config_stay():
    plain = keras.optimizers.Adam(0.02, beta_1=0.8, name="mine")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02, 0.8, name="mine"))
    assert type(optimizer) is keras.optimizers.Adam
    assert optimizer.get_config() == plain.get_config()
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(plain)
    again = keras.optimizers.Adam.from_config(optimizer.get_config())
    variables = [keras.Variable([1.0])]
    assert exchanges(again.apply, [tf.constant([1.0])], variables) == 0
    variables = [keras.Variable([1.0])]
    assert exchanges(optimizer.apply, [tf.constant([1.0])], variables) == 1
    # Keras copies by saving and loading, and a loaded optimizer exchanges nothing.
    copied, variables = copy.deepcopy(optimizer), [keras.Variable([1.0])]
    assert exchanges(copied.apply, [tf.constant([1.0])], variables) == 0


def check_optimizer_is_saved():
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    model.save(f"by-rank-{RANK}.keras")
    again = keras.models.load_model(f"by-rank-{RANK}.keras")
    assert type(again.optimizer) is keras.optimizers.Adam
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations) > 0
    close(again.get_weights(), model.get_weights())


def check_training_loops_are_those_of_one_process():
    for place, make in enumerate(OPTIMIZERS.values()):
        expected = by_loop(make(), whole=True, graph=False)
        graph = place % 2 == 1
        optimizer = hvd.DistributedOptimizer(make())
        close(by_loop(optimizer, whole=False, graph=graph), expected)
        taped = by_loop(make(), False, not graph, hvd.DistributedGradientTape)
        close(taped, expected)


def check_training_fit_is_that_of_one_process():
    def fitted(optimizer, whole):
        model = network()
        model.compile(optimizer, "mse")
        x, y = map(np.concatenate, zip(*batches(whole), strict=True))
        size = ROWS * SIZE if whole else ROWS
        model.fit(x, y, batch_size=size, shuffle=False, epochs=2, verbose=0)
        return model.get_weights()

    for name in ("sgd", "adam"):
        expected = fitted(OPTIMIZERS[name](), whole=True)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name]())
        # Keras computes losses in float32.
        close(fitted(optimizer, whole=False), expected, 1e-6)


def check_training_old_optimizers_in_eager_code():
    tf1 = tf.compat.v1

    def trained(optimizer, whole):
        w = tf.Variable(tf.ones([6, 1], tf.float64))
        for x, y in batches(whole):
            optimizer.minimize(
                lambda x=x, y=y: tf.reduce_mean((x @ w - y) ** 2), var_list=[w]
            )
        return [w.numpy()]

    def make():
        return tf1.train.MomentumOptimizer(0.1, 0.9)

    expected = trained(make(), whole=True)
    close(trained(hvd.DistributedOptimizer(make()), whole=False), expected)


def check_settings():
    gradient = tf.constant([RANK + 1.0])
    total = SIZE * (SIZE + 1) / 2
    for arguments, expected in (
        ({}, total / SIZE),
        ({"op": hvd.Sum}, total),
        ({"gradient_predivide_factor": 2.0}, total / SIZE),
        ({"compression": hvd.Compression.fp16}, total / SIZE),
        ({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, total / SIZE),
    ):
        variable = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
        optimizer.apply([gradient], [variable])
        np.testing.assert_allclose(variable.numpy(), [-expected], rtol=1e-3)
    plain = keras.optimizers.SGD(1.0)
    refuses(
        ValueError,
        "Average, Sum or Adasum",
        lambda: hvd.DistributedOptimizer(plain, op=hvd.Max),
    )
    refuses(
        ValueError,
        "1 or more",
        lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=0),
    )
    refuses(TypeError, "neither a Keras", lambda: hvd.DistributedOptimizer("adam"))


def passes(optimizer, variables, graph):
    """The first number of the first variable after each of four gradients."""

    def step(x):
        sparse = tf.IndexedSlices(x[:1], tf.constant([1]), tf.constant([3, 1]))
        optimizer.apply([x, sparse, None], variables)

    act = tf.function(step) if graph else step
    for i in range(4):
        act(tf.fill([3, 1], float(RANK + i)))
        yield float(variables[0].numpy()[0, 0])


def check_several_passes():
    """Four gradients in two steps, some of which are slices or None."""
    mean = (SIZE - 1) / 2
    for average in (False, True):
        for graph in (False, True):
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )
            variables = [keras.Variable(np.zeros((3, 1))) for _ in range(3)]
            seen = np.array(list(passes(optimizer, variables, graph)))
            first = -(2 * mean + 1) / (2 if average else 1)
            both = first - (2 * mean + 5) / (2 if average else 1)
            np.testing.assert_allclose(seen, np.array([0, first, first, both]))
            rows = np.array([[0], [both], [0]])
            np.testing.assert_allclose(variables[1].numpy(), rows)
            assert int(optimizer.iterations) == 4


def check_slices():
    def trained(optimizer, whole):
        keras.utils.set_random_seed(3)
        embedding = keras.layers.Embedding(9, 2, dtype="float64")
        embedding.build()
        for step in range(3):
            # Rank 0 has no rows in the last step.
            ids = [[(r + step) % 9] * (r + step + 1) for r in range(SIZE)]
            if step == 2:
                ids[0] = []
            everyone = [i for theirs in ids for i in theirs]
            own = everyone if whole else ids[RANK]
            with tf.GradientTape() as tape:
                rows = embedding(tf.constant(own, tf.int32, shape=[len(own)]))
                loss = tf.reduce_sum(rows**2) / (SIZE if whole else 1)
            optimizer.apply(
                tape.gradient(loss, embedding.trainable_variables),
                embedding.trainable_variables,
            )
        return embedding.get_weights()

    expected = trained(keras.optimizers.SGD(0.1), whole=True)
    for dense in (False, True):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), sparse_as_dense=dense
        )
        close(trained(optimizer, whole=False), expected)


def check_no_gradient_is_left_out():
    used, frozen = keras.Variable([1.0]), keras.Variable([2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([1.0]), None], [used, frozen])
    assert (used.numpy()[0], frozen.numpy()[0]) == (0.0, 2.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(used.value * 3)
    gradients = tape.gradient(loss, [used.value, frozen.value])
    assert gradients[1] is None
    assert gradients[0].numpy().tolist() == [3.0]


def check_tape():
    a, b = tf.Variable(float(RANK)), tf.Variable([1.0, 2.0])
    mean = (SIZE - 1) / 2
    plain = tf.GradientTape(persistent=True)
    with hvd.DistributedGradientTape(plain) as tape:
        loss = a * a + tf.reduce_sum(b) * RANK
    assert isinstance(tape, tf.GradientTape)
    found = tape.gradient(loss, {"a": a, "b": (b,)})
    assert float(found["a"]) == 2 * mean
    assert found["b"][0].numpy().tolist() == [mean, mean]
    assert float(tape.gradient(loss, a)) == 2 * mean
    zero = tape.gradient(
        loss, tf.Variable(1.0), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    assert float(zero) == 0.0
    with tf.GradientTape() as local:
        loss = a * 3.0 * (RANK + 1)
    summed = hvd.DistributedGradientTape(local, op=hvd.Sum).gradient(loss, [a])
    assert float(summed[0]) == 3 * SIZE * (SIZE + 1) / 2


def check_a_step_that_overflows_on_one_rank_is_taken_by_none():
    model = network("mixed_float16")
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(inner, "mse", jit_compile=True)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    model.compile(scaled, "mse", jit_compile=True)
    assert not model.jit_compile
    before = model.get_weights()
    x = np.ones((4, 6)) * (1e30 if RANK == 0 else 1.0)
    model.train_on_batch(x, np.ones((4, 1)))
    close(model.get_weights(), before)
    model.train_on_batch(np.ones((4, 6)) * (RANK + 1), np.ones((4, 1)))
    assert not np.allclose(model.get_weights()[0], before[0])
    weights = hvd.allgather_object(model.get_weights()[0])
    for other in weights:
        np.testing.assert_array_equal(other, weights[0])


def check_callbacks():
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    lazily = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    optimizer = keras.optimizers.SGD(0.1 * SIZE, momentum=0.9)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    history = model.fit(
        X,
        Y + RANK,
        batch_size=SIZE * ROWS,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[
            lazily,
            hvd.callbacks.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(
                0.1 * SIZE, 0.1, start_epoch=2, end_epoch=4
            ),
            hvd.callbacks.LearningRateScheduleCallback(
                0.1 * SIZE,
                lambda epoch: 1 / (1 + epoch),
                start_epoch=4,
                staircase=False,
            ),
            Rates(),
            hvd.callbacks.MetricAverageCallback(),
        ],
    )
    losses = hvd.allgather_object(history.history["loss"])
    assert all(other == losses[0] for other in losses)
    weights = hvd.allgather_object(model.get_weights())
    for other in weights:
        for one, two in zip(other, weights[0], strict=True):
            np.testing.assert_array_equal(one, two)
    steps = len(X) // (SIZE * ROWS)
    warm = [(1 + (i + 1) / steps * (SIZE - 1) / 2) / SIZE for i in range(2 * steps)]
    late = [1 / (5 + i / steps) for i in range(steps)]
    factors = [*warm, *[1.0] * steps, *[0.1] * steps, *late]
    np.testing.assert_allclose(rates, 0.1 * SIZE * np.array(factors), rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"][2], 0.1 * SIZE, rtol=1e-5)


def check_momentum_is_corrected():
    """As if the velocity had been accumulated with the new learning rate."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), "mse"
    )
    model.set_weights([np.array([[1.0]])])
    schedule = hvd.callbacks.LearningRateSchedule(0.1, lambda epoch: 0.5**epoch)
    weights = []

    class Weights(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights.append(float(self.model.get_weights()[0][0, 0]))

    one = np.ones((1, 1))
    model.fit(one, 0 * one, epochs=2, verbose=0, callbacks=[schedule, Weights()])
    # The gradient of w^2 is 2 w. Velocity -0.2 is halved; momentum keeps half of it.
    np.testing.assert_allclose(weights, [0.8, 0.8 - 0.05 - 0.05 * 1.6], rtol=1e-5)


def check_broadcast_of_a_built_model():
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(1, name="only")], name="built"
    )
    first = model.get_weights()[0]
    model.compile(keras.optimizers.SGD(0.0), "mse")
    root = SIZE - 1
    model.fit(
        X, Y, epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastVariables(root)]
    )
    expected = hvd.broadcast_object(first, root)
    np.testing.assert_array_equal(model.get_weights()[0], expected)


if __name__ == "__main__":
    checks.run(globals())

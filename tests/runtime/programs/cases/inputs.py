# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Sources of batches, and their sizes."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import (
    EPOCHS,
    RANK,
    RANKS,
    ROWS,
    SHARDS,
    classifier,
    compiled,
    data,
    main,
    raised_by,
    results,
)


def case_fit():
    """50 rows in batches of 16: the last batch has 2, fewer than there are ranks."""
    x, y = data()
    model = compiled(classifier())
    history = model.fit(x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0)
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, y, batch_size=7, verbose=0))
    found["predict"] = model.predict(x, batch_size=7, verbose=0)
    found["steps"] = np.array(int(model.optimizer.iterations))
    return found


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.x) // 13)

    def __getitem__(self, index):
        rows = slice(index * 13, (index + 1) * 13)
        return self.x[rows], self.y[rows]


def case_sources():
    """NumPy arrays, tf.data, a PyDataset and a generator give the same batches."""
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(13)

    def generator():
        while True:
            for start in range(0, 50, 13):
                yield x[start : start + 13], y[start : start + 13]

    found = {}
    for name, arguments in {
        "numpy": {"x": x, "y": y, "batch_size": 13, "shuffle": False},
        "dataset": {"x": dataset},
        "pydataset": {"x": Batches(x, y), "shuffle": False},
        "generator": {"x": generator(), "steps_per_epoch": 4},
    }.items():
        keras.utils.set_random_seed(3)
        model = compiled(classifier())
        history = model.fit(epochs=2, verbose=0, **arguments)
        found[f"{name}_loss"] = np.array(history.history["loss"])
        found[f"{name}_w"] = model.get_weights()[0]
    return found


def lines(rows=50):
    """Text that a pipeline parses, and labels."""
    x, y = data(rows)
    return tf.data.Dataset.from_tensor_slices(
        ([",".join(f"{value:.4f}" for value in row) for row in x], y)
    )


def parsed(line, label):
    numbers = tf.strings.to_number(tf.strings.split(line, ","))
    return tf.ensure_shape(numbers, [6]), label


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2


@contextlib.contextmanager
def parts_taken(at_least):
    """Fails if ranks have not taken so many batches by parts."""
    if RANKS == 1 or SHARDS:
        yield
        return
    from tfcluster.runtime.partition.part_iterators import PartIterator

    taken, take = [], PartIterator.take

    def counted(iterator):
        batch = take(iterator)
        taken.append(batch.compared is not None)
        return batch

    PartIterator.take = counted  # type: ignore[method-assign]  # to count
    try:
        yield
    finally:
        PartIterator.take = take  # type: ignore[method-assign]
    assert sum(taken) >= at_least, taken


def case_divided_augmentation():
    """Every rank draws random numbers for all elements, and uses those of its own."""

    def augmented(line, label):
        numbers, label = parsed(line, label)
        turned = tf.image.random_flip_left_right(tf.reshape(numbers, [2, 3, 1]))
        bright = tf.image.random_brightness(tf.image.random_flip_up_down(turned), 0.4)
        return tf.reshape(bright, [6]), label

    dataset = lines().shuffle(30).map(augmented).repeat(2).batch(16).prefetch(2)
    model = compiled(classifier())
    with parts_taken(8):
        return results(model, model.fit(dataset, epochs=3, verbose=0))


def case_divided_pipelines():
    """Each rank parses its own rows: in all methods, in epochs that end early."""

    def weighted(line, label):
        numbers, label = parsed(line, label)
        return {"numbers": numbers}, label, tf.abs(numbers[0])

    inputs = keras.Input((6,), name="numbers")
    model = compiled(keras.Model({"numbers": inputs}, classifier()(inputs)))
    shuffled = lines().shuffle(30, seed=4)
    dataset = shuffled.map(weighted, num_parallel_calls=2).batch(16).prefetch(2)

    def endless():
        # Read twice, it would have an order that depends on how far TensorFlow has read
        # ahead, also in one process.
        return lines().shuffle(30, seed=5).map(weighted).repeat().batch(9)

    with parts_taken(30):
        history = model.fit(dataset, epochs=3, validation_data=dataset, verbose=0)
        found = results(model, history)
        model.fit(endless(), epochs=2, steps_per_epoch=4, verbose=0)
        model.fit(endless(), epochs=3, callbacks=[Stop()], steps_per_epoch=5, verbose=0)
        found["w"] = model.get_weights()[0]
        found["evaluate"] = np.array(model.evaluate(dataset, verbose=0))
        found["predict"] = model.predict(dataset, verbose=0)
    return found


def trained_step(model):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        weights = model.trainable_weights
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return step


def case_divided_loops():
    """Each rank parses its own rows of what loops of the program read, too."""
    model = compiled(classifier())
    model.loss = keras.losses.SparseCategoricalCrossentropy()
    step = trained_step(model)
    dataset = lines().shuffle(30).map(parsed).batch(16).prefetch(2)
    found, losses, sums = {}, [], []

    def read(pair):
        sums.append(np.sum([np.sum(tensor) for tensor in pair]))
        losses.append(step(*pair))

    @tf.function
    def of_iterator(batches):
        return step(*next(batches))

    @tf.function
    def of_dataset(batches):
        for x, y in batches:
            step(x, y)

    with parts_taken(24):
        for _ in range(2):
            for pair in dataset:
                read(pair)
        # Passes over shuffled elements have their orders from when they begin.
        first, second = iter(dataset), iter(dataset)
        for batches in (second, first, second):
            read(next(batches))
        endless = iter(dataset.map(lambda x, y: (x * 2.0, y)).repeat())
        for _ in range(3):
            read(endless.get_next())
            losses.append(of_iterator(endless))
        read(endless.get_next_as_optional().get_value())
        read(next(endless))
        for pair in dataset.take(1).as_numpy_iterator():
            read(pair)
        model.fit(dataset, epochs=2, verbose=0)
        for pair in dataset:
            read(pair)
        later = lines().map(parsed).shuffle(30).batch(16)
        for other in (lambda: model.fit(later, verbose=0), lambda: of_dataset(later)):
            first = iter(later)
            other()
            read(next(first))
        # It has drawn seeds, though nothing is read from it.
        del first
        assert iter(later).element_spec
        for pair in later:
            read(pair)
    found["sums"], found["losses"] = np.array(sums), np.array(losses)
    found["w"] = model.get_weights()[0]
    return found


def case_loops_that_differ():
    """The ranks' files differ, so loops get the chief's batches, too."""
    y = data(51)[1]
    texts = [f"{RANK},{row % 7},{row % 3},1,{row % 5},0" for row in range(51)]
    dataset = tf.data.Dataset.from_tensor_slices((texts, y)).map(parsed).batch(16)
    with parts_taken(1):
        sums = [[np.sum(x), np.sum(y)] for x, y in dataset]
    return {"sums": np.array(sums)}


def case_errors_in_loops():
    """An element that one rank cannot parse ends the loops of all."""
    texts = ["1,2,3,4,5,6"] * 20 + ["1,2,3,4,5,no number"] + ["1,2,3,4,5,6"] * 11
    dataset = tf.data.Dataset.from_tensor_slices((texts, [1] * 32)).map(parsed)
    sums: list[float] = []
    with parts_taken(1):
        error = raised_by(
            lambda: sums.extend(np.sum(x) for x, _ in iter(dataset.batch(16)))
        )
        assert "no number" in str(error), error
        sums += [np.sum(x) for x, _ in lines().map(parsed).batch(16)]
        batches = iter(dataset.batch(6))
        for _ in range(9):
            try:
                sums.append(np.sum(next(batches)[0]))
            except tf.errors.InvalidArgumentError:
                sums.append(-1.0)
            except StopIteration:
                sums.append(-2.0)
    return {"sums": np.array(sums)}


def case_iterators_in_checkpoints():
    """Ranks read whole batches if a checkpoint has the iterator."""
    dataset = lines().shuffle(30).map(parsed).batch(16)
    batches = iter(dataset)
    checkpoint = tf.train.Checkpoint(batches=batches)
    sums = [np.sum(next(batches)[0])]
    path = checkpoint.write("batches")
    sums += [np.sum(x) for x, _ in batches]
    checkpoint.read(path)
    sums += [np.sum(x) for x, _ in batches]
    other = iter(dataset)
    checkpoint.batches = iter(dataset)
    sums += [np.sum(next(checkpoint.batches)[0]), np.sum(next(other)[0])]
    checkpoint.write("batches")
    late = iter(dataset)
    next(late)
    if RANKS > 1 and not SHARDS:
        checkpoint = tf.train.Checkpoint(batches=late)
        error = raised_by(lambda: checkpoint.write("late"))
        assert "before the first batch" in str(error), error
    return {"sums": np.array(sums)}


def case_whole_pipelines():
    """What cannot be divided, or is not read by parts, is computed whole."""
    model, found = compiled(classifier()), {}
    dataset = lines().shuffle(30, seed=4).map(parsed).batch(16)
    model.fit(dataset, epochs=2, class_weight={0: 1.0, 1: 3.0}, verbose=0)
    found["weighted"] = model.get_weights()[0]
    model.fit(dataset.cache(), epochs=2, verbose=0)
    found["cached"] = model.get_weights()[0]
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
    model.fit(dataset, epochs=2, verbose=0)
    found["two_steps"] = model.get_weights()[0]
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    model.fit(dataset, verbose=0)
    found["eager"] = model.get_weights()[0]
    return found


def case_elements_that_differ():
    """The ranks' files differ, so all ranks continue with the chief's batches."""
    y = data(51)[1]
    texts = [f"{RANK},{row % 7},{row % 3},1,{row % 5},0" for row in range(51)]
    dataset = tf.data.Dataset.from_tensor_slices((texts, y)).map(parsed).batch(16)
    model = compiled(classifier())
    with parts_taken(1):
        return results(model, model.fit(dataset, epochs=2, verbose=0))


def case_errors_in_elements():
    """An element that one rank cannot parse is an error on all, who may go on."""
    texts = ["1,2,3,4,5,6"] * 20 + ["1,2,3,4,5,no number"] + ["1,2,3,4,5,6"] * 11
    dataset = tf.data.Dataset.from_tensor_slices((texts, [1] * 32)).map(parsed)
    model = compiled(classifier())
    with parts_taken(1):
        error = raised_by(lambda: model.fit(dataset.batch(16), verbose=0))
    assert "no number" in str(error), error
    history = model.fit(lines().map(parsed).batch(16), epochs=2, verbose=0)
    return results(model, history)


def case_different_beginnings():
    """The ranks' initial weights differ; all ranks use the chief's."""
    keras.utils.set_random_seed(11 if RANK == 0 else 12 + RANK)
    x, y = data()
    model = compiled(classifier())
    return results(model, model.fit(x, y, batch_size=16, shuffle=False, verbose=0))


def rows_of_batches(rows, batch_size):
    x, y = data(rows)
    model = compiled(classifier(), keras.optimizers.SGD(0.1))
    history = model.fit(
        x, y, batch_size=batch_size, epochs=3, validation_data=(x[:5], y[:5]),
        validation_batch_size=2, verbose=0,
    )  # fmt: skip
    return results(model, history)


def case_batches_of_one():
    """Every batch has fewer rows than there are ranks."""
    return rows_of_batches(7, 1)


def case_batches_of_two():
    return rows_of_batches(9, 2)


def case_batches_of_seven():
    return rows_of_batches(38, 7)


def case_workers():
    """Several threads produce the batches."""
    x, y = data(ROWS)

    class Made(Batches):
        def __init__(self):
            super().__init__(x, y)
            self.workers, self.max_queue_size = 3, 4

    model = compiled(classifier())
    history = model.fit(
        Made(), epochs=EPOCHS, validation_data=Made(), shuffle=True, verbose=0
    )
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(Made(), verbose=0))
    found["predict"] = model.predict(Made(), verbose=0)
    return found


def case_endless():
    """Infinite datasets and generators with a given number of steps."""
    x, y = data()

    def dataset():
        rows = tf.data.Dataset.from_tensor_slices((x, y))
        return rows.shuffle(50, seed=4).repeat().batch(9)

    def generator():
        while True:
            yield x[:20], y[:20], np.linspace(0.5, 2.0, 20)
            yield x[20:], y[20:], np.linspace(0.5, 2.0, 30)

    model = compiled(classifier(), keras.optimizers.SGD(0.05))
    history = model.fit(
        dataset(), epochs=5, steps_per_epoch=7, validation_data=dataset(),
        validation_steps=2, validation_freq=2, verbose=0,
    )  # fmt: skip
    found = results(model, history)
    history = model.fit(generator(), epochs=4, steps_per_epoch=4, verbose=0)
    found["again"] = np.array(history.history["loss"])
    found["evaluate"] = np.array(model.evaluate(generator(), steps=3, verbose=0))
    found["predict"] = model.predict(generator(), steps=3, verbose=0)
    return found


class OneBatchAtATime(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_predict_batch_end(self, batch, logs=None):
        self.seen.append(batch)


def case_predictions():
    """Several outputs, one of strings, in batches whose rows ranks join at the end."""
    x, _ = data(53)
    inputs = keras.Input(x.shape[1:])
    hidden = keras.layers.Dense(6, activation="tanh")(inputs)
    outputs = {
        "logits": keras.layers.Dense(3)(hidden),
        "columns": keras.layers.Reshape((6, 1))(hidden),
        "text": keras.layers.Lambda(lambda rows: tf.strings.as_string(rows[:, 0]))(
            hidden
        ),
    }
    model = keras.Model(inputs, outputs)
    found = {}

    def predict(name, *args, **kwargs):
        predicted = model.predict(*args, **kwargs, verbose=0)
        predicted["text"] = predicted["text"].astype(float)
        found.update({f"{name}_{key}": rows for key, rows in predicted.items()})

    predict("batches", x, batch_size=8)
    predict("last_of_one_row", x, batch_size=52)
    predict("one_row", x[:1])
    seen = OneBatchAtATime()
    predict("callback", x, batch_size=20, callbacks=[seen])
    found["seen"] = np.array(seen.seen)
    model.compile(steps_per_execution=3)
    predict("three_at_once", x, batch_size=8)
    ragged = keras.Sequential(
        [keras.Input(x.shape[1:]), keras.layers.Lambda(tf.RaggedTensor.from_tensor)]
    )
    found["ragged"] = ragged.predict(x, batch_size=8, verbose=0).to_tensor().numpy()
    return found


def case_several_fits():
    x, y = data()
    model = compiled(classifier())
    first = model.fit(x, y, batch_size=16, epochs=3, verbose=0)
    second = model.fit(
        x, y, batch_size=11, epochs=6, initial_epoch=3, verbose=0, shuffle=False
    )
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    third = model.fit(x[:23], y[:23], batch_size=8, epochs=7, verbose=0)
    found = results(model, third)
    found["losses"] = np.array(first.history["loss"] + second.history["loss"])
    return found


def case_augmented():
    """Random numbers in the pipeline: all ranks draw the same ones."""
    x, y = data(ROWS)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(16)
    dataset = dataset.map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y))
    model = compiled(classifier())
    return results(model, model.fit(dataset, epochs=EPOCHS, verbose=0))


def case_augmented_for_a_loop():
    """Functions of a pipeline get whole batches, also if a loop divides them."""
    tf.random.set_seed(5)
    x, y = data(48)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    dataset = dataset.map(
        lambda x, y: (x + tf.random.stateless_normal(tf.shape(x), [1, 2]), y)
    ).map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y))
    model, optimizer = classifier(), keras.optimizers.SGD(0.1)
    for _ in range(2):
        for rows, labels in dataset:
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(
                    labels, model(rows)
                )
                loss = tf.reduce_mean(losses)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
    return results(model)


def case_cached_in_files():
    """Every process writes its own cache; a saved dataset is written once."""
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset.map(lambda x, y: (x, 1 - y)).save("saved")
    dataset = tf.data.Dataset.load("saved").map(lambda x, y: (x, 1 - y))
    dataset = dataset.cache("cached").shuffle(50, seed=2).batch(8)
    model = compiled(classifier())
    found = results(model, model.fit(dataset, epochs=3, verbose=0))
    snapshot = tf.data.Dataset.range(30).snapshot("snapshots")
    for _ in range(2):
        found["snapshot"] = np.array(sorted(int(number) for number in snapshot))
    return found


def case_without_a_fixed_order():
    """Several threads fill the dataset, and their timing decides its order."""
    x, y = data()
    dataset = tf.data.Dataset.range(50).map(
        lambda i: (tf.gather(x, i), tf.gather(y, i)),
        num_parallel_calls=4,
        deterministic=False,
    )
    model = compiled(classifier())
    history = model.fit(dataset.batch(25), epochs=2, verbose=0)
    return results(model, history)


class GraphConvolution(keras.layers.Layer):
    """Sums the features of each node's neighbours."""

    def __init__(self, units, activation=None):
        super().__init__()
        self.dense = keras.layers.Dense(units, activation=activation)

    def call(self, inputs):
        nodes, adjacency = inputs
        hidden = self.dense(nodes)
        if isinstance(adjacency, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(adjacency, hidden)
        return keras.ops.matmul(adjacency, hidden)


def graph(nodes=24):
    """Features, a normalized adjacency matrix, labels, and a weight for each node."""
    x, y = data(nodes)
    generator = np.random.default_rng(3)
    links = generator.random((nodes, nodes)) < 0.15
    links = (links | links.T | np.eye(nodes, dtype=bool)).astype("float32")
    return x, links / links.sum(1, keepdims=True), y, generator.random(nodes)


def graph_network(sparse=False):
    nodes = keras.Input((6,))
    adjacency = keras.Input((None,), sparse=sparse)
    hidden = GraphConvolution(8, "tanh")([nodes, adjacency])
    found = GraphConvolution(2, "softmax")([hidden, adjacency])
    name = "sparse_graph" if sparse else "graph"
    return keras.Model([nodes, adjacency], found, name=name)


def case_graph_as_a_batch():
    """The only batch is a graph; its nodes are not rows that could be divided."""
    x, adjacency, y, weight = graph()
    model = compiled(graph_network(), weighted_metrics=[])
    history = model.fit(
        [x, adjacency],
        y,
        sample_weight=weight,
        batch_size=len(x),
        shuffle=False,
        epochs=20,
        verbose=0,
        validation_data=([x, adjacency], y, 1.0 - weight),
        validation_batch_size=len(x),
    )
    tested = model.evaluate([x, adjacency], y, batch_size=len(x), verbose=0)
    return {**results(model, history), "evaluate": np.array(tested)}


def case_sparse_graph_as_a_batch():
    x, adjacency, y, weight = graph()
    model = compiled(graph_network(sparse=True), weighted_metrics=[])
    element = (x, tf.sparse.from_dense(adjacency)), y, weight.astype("float32")
    batches = tf.data.Dataset.from_tensors(element).repeat()
    history = model.fit(batches, steps_per_epoch=1, epochs=20, verbose=0)
    return results(model, history)


class WithTable(keras.Sequential):
    """Each batch contains a table as well as its rows."""

    def train_step(self, data):
        x, y, table = data
        with tf.GradientTape() as tape:
            found = self(x * tf.reduce_mean(table), training=True)
            loss = tf.reduce_mean((found[:, 0] - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def test_step(self, data):
        x, y, _ = data
        return {"loss": tf.reduce_mean((self(x)[:, 0] - y) ** 2)}


def case_table_beside_the_rows():
    """A tensor's length is not the batch size."""
    x, y = data(60)
    y = y.astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    table = tf.constant([0.5, 1.0, 2.0])
    batches = rows.map(lambda x, y: (x, y, table))
    model = WithTable([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd")
    history = model.fit(batches, epochs=6, validation_data=batches, verbose=0)
    return results(model, history)


if __name__ == "__main__":
    main(globals())

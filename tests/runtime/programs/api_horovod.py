# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Horovod's API beyond the operations, on every rank."""

import json
from pathlib import Path

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs import checks
from tests.runtime.programs.api_data import refuses
from tests.runtime.programs.checks import RANK, SIZE
from tfcluster.runtime import process_sets

hvd.init()
tf1 = tf.compat.v1


def check_the_name_horovod():
    import horovod
    import horovod.keras

    import tfcluster.runtime as tfc

    assert horovod.__version__
    assert horovod.__file__
    assert hvd.DistributedOptimizer is tfc.DistributedOptimizer
    assert hvd_keras.callbacks.MetricAverageCallback
    assert horovod.keras.DistributedOptimizer is tfc.DistributedOptimizer
    assert hvd.elastic.run
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    assert HorovodInternalError is tfc.CollectiveError
    assert issubclass(HostsUpdatedInterrupt, Exception)
    names: dict[str, object] = {}
    exec("from horovod.tensorflow import *", names)
    assert names["allreduce"] is tfc.allreduce
    refuses(AttributeError, "no attribute", lambda: hvd.no_such_name)


def check_what_it_is_built_on():
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
    assert hvd.nccl_built() == 0
    assert not any((hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built()))
    assert not any((hvd.rocm_built(), hvd.mpi_threads_supported()))
    assert hvd.is_homogeneous()


def check_values_of_keras():
    found = hvd_keras.allreduce([1.0, RANK], "values", False)
    np.testing.assert_allclose(found.numpy(), [SIZE, sum(range(SIZE))])
    rows = hvd_keras.allgather(np.array([RANK]), "rows")
    assert rows.numpy().tolist() == list(range(SIZE))
    assert float(hvd_keras.broadcast(float(RANK), SIZE - 1)) == SIZE - 1
    part = hvd_keras.reducescatter(np.arange(SIZE) * 1.0)
    assert part.numpy().tolist() == [float(RANK)]
    with tf.Graph().as_default(), tf1.Session():
        summed = hvd_keras.allreduce([1.0], average=False)
        assert (type(summed), summed.tolist()) == (np.ndarray, [SIZE])
    assert hvd_keras.size() == SIZE


def check_ignored_keywords():
    one = tf.constant([1.0])
    for found in (
        hvd.allreduce(one, device_dense="/cpu:0", device_sparse="", op=hvd.Average),
        hvd.allreduce(one, ignore_name_scope=True),
        hvd.broadcast(one, 0, ignore_name_scope=True),
        hvd.allgather(one, ignore_name_scope=True)[:1],
        hvd.alltoall(tf.ones([SIZE]), ignore_name_scope=True)[:1],
        hvd.reducescatter(tf.ones([SIZE]), ignore_name_scope=True)[:1],
    ):
        assert found.numpy().tolist() == [1.0]


def check_grouped_reducescatter():
    rows = tf.reshape(tf.range(2.0 * SIZE + 1), [-1, 1])
    counts = tf.range(SIZE)
    for way in (
        lambda: hvd.grouped_reducescatter([rows, counts], op=hvd.Sum),
        tf.function(lambda: hvd.grouped_reducescatter([rows, counts], op=hvd.Sum)),
    ):
        first, second = way()
        start = 2 * RANK + min(RANK, 1)
        end = start + 2 + (RANK < 1)
        np.testing.assert_allclose(first, rows[start:end] * SIZE)
        assert second.numpy().tolist() == [RANK * SIZE]
    with tf.GradientTape() as tape:
        tape.watch(rows)
        part, _ = hvd.grouped_reducescatter([rows, counts], op=hvd.Sum)
        loss = tf.reduce_sum(part) * (RANK + 1)
    sizes = [2 + (r < 1) for r in range(SIZE)]
    expected = np.repeat(np.arange(SIZE) + 1.0, sizes)[:, None] * SIZE
    np.testing.assert_allclose(tape.gradient(loss, rows), expected)
    assert hvd.grouped_reducescatter([]) == []


def check_adasum():
    """Orthogonal vectors are added, parallel ones are averaged."""
    if SIZE & (SIZE - 1):
        refuses(
            NotImplementedError,
            "power of two",
            lambda: hvd.allreduce(tf.ones([2]), op=hvd.Adasum),
        )
        found = hvd.allreduce(tf.ones([2]), op=hvd.Sum)
        np.testing.assert_allclose(found, [SIZE, SIZE])
        return
    same = hvd.allreduce(tf.constant([3.0, 4.0]), op=hvd.Adasum)
    np.testing.assert_allclose(same, [3.0, 4.0], rtol=1e-6)
    own = np.zeros(SIZE, np.float32)
    own[RANK] = RANK + 1.0
    found = hvd.allreduce(tf.constant(own), op=hvd.Adasum)
    np.testing.assert_allclose(found, np.arange(SIZE) + 1.0, rtol=1e-6)
    variable = tf.Variable([1.0, 1.0])
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum) as tape:
        loss = variable[RANK % 2] * 2.0
    if SIZE == 2:
        gradient = tf.convert_to_tensor(tape.gradient(loss, variable))
        np.testing.assert_allclose(gradient, [2.0, 2.0])
    refuses(TypeError, "floating", lambda: hvd.allreduce(tf.range(2), op=hvd.Adasum))
    refuses(
        ValueError,
        "Keras",
        lambda: hvd.DistributedOptimizer(
            tf1.train.GradientDescentOptimizer(0.1), op=hvd.Adasum
        ),
    )


def check_process_sets():
    everyone = hvd.global_process_set
    assert everyone.ranks == list(range(SIZE))
    assert (everyone.process_set_id, everyone.rank()) == (0, RANK)
    refuses(ValueError, "do not exist", lambda: hvd.add_process_set([SIZE]))
    refuses(ValueError, "same ranks", lambda: hvd.add_process_set(range(SIZE)))
    if SIZE == 1:
        return
    single = hvd.add_process_set(hvd.ProcessSet([0]))
    tail = hvd.add_process_set([SIZE - 1, 1] if SIZE > 2 else [1])
    assert tail.ranks == list(range(1, SIZE)) if SIZE < 4 else [1, SIZE - 1]
    assert hvd.get_process_set_ids_and_ranks()[tail.process_set_id] == tail.ranks
    assert single.included() == (RANK == 0)
    assert int(hvd.process_set_included_op(single.process_set_id)) == (RANK == 0)
    assert int(hvd.size_op(tail.process_set_id)) == tail.size()
    if tail.included():
        own = tf.constant([float(RANK)])
        assert tail.rank() == tail.ranks.index(RANK)
        ops = {
            "sum": lambda: hvd.allreduce(own, op=hvd.Sum, process_set=tail),
            "mean": lambda: hvd.allreduce(own, process_set=tail),
            "rows": lambda: hvd.allgather(own, process_set=tail),
            "root": lambda: hvd.broadcast(own, tail.ranks[-1], process_set=tail),
            "objects": lambda: hvd.allgather_object(RANK, process_set=tail),
        }
        total = float(sum(tail.ranks))
        for act in (lambda f: f(), lambda f: tf.function(f)()):
            assert act(ops["sum"]).numpy().tolist() == [total]
            assert act(ops["mean"]).numpy().tolist() == [total / tail.size()]
            assert act(ops["rows"]).numpy().tolist() == tail.ranks
            assert act(ops["root"]).numpy().tolist() == [tail.ranks[-1]]
        assert ops["objects"]() == tail.ranks
        refuses(
            ValueError,
            "rank 0 is not among",
            lambda: hvd.broadcast(own, 0, process_set=tail),
        )
        with tf.Graph().as_default():
            sums = [hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=tail)] * 3
            with tf1.Session() as session:
                assert session.run(sums) == [tail.size()] * 3
        with tf.GradientTape() as tape:
            tape.watch(own)
            rows = hvd.allgather(own, process_set=tail)
            loss = tf.reduce_sum(rows) * (RANK + 1)
        expected = (total + tail.size()) / tail.size()
        np.testing.assert_allclose(tape.gradient(loss, own), [expected])
    else:
        refuses(
            ValueError,
            "is not in",
            lambda: hvd.allreduce(tf.ones([1]), process_set=tail),
        )
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=tail)
    variable = keras.Variable([0.0])
    optimizer.apply([tf.constant([float(RANK)])], [variable])
    mean = sum(tail.ranks) / tail.size()
    np.testing.assert_allclose(variable, [-mean if tail.included() else -RANK])
    assert hvd.remove_process_set(tail)
    assert not hvd.remove_process_set(tail)
    refuses(
        hvd.CollectiveError,
        "add_process_set",
        lambda: hvd.allreduce(tf.ones([1]), process_set=tail),
    )
    number = single.process_set_id
    copy = hvd.ProcessSet([0])
    copy.process_set_id = number
    with tf.Graph().as_default():
        refuses(
            ValueError,
            "has set its process_set_id",
            lambda: hvd.allreduce(tf.constant(1.0), process_set=copy),
        )
    assert hvd.remove_process_set(single)
    again = hvd.add_process_set([0])
    assert again.process_set_id == number
    assert hvd.remove_process_set(again)
    assert list(process_sets.get_process_set_ids_and_ranks()) == [0]


def check_process_sets_of_init():
    hvd.init(comm=list(range(SIZE)), process_sets="dynamic")
    refuses(ValueError, "dynamic", lambda: hvd.init(process_sets="static"))
    refuses(ValueError, "leave out ranks", lambda: hvd.init([SIZE]))
    if SIZE == 1:
        return
    first, others = hvd.ProcessSet([0]), hvd.ProcessSet(range(SIZE - 1, 0, -1))
    copies = [first, others, hvd.ProcessSet([0])]
    refuses(ValueError, "the same ranks", lambda: hvd.init(process_sets=copies))
    assert list(hvd.get_process_set_ids_and_ranks()) == [0]
    for _ in range(2):
        hvd.init(process_sets=[first, others])
    number = others.process_set_id
    assert hvd.get_process_set_ids_and_ranks()[number] == list(range(1, SIZE))
    assert str(others) == (
        f"ProcessSet(process_set_id={number}, ranks={others.ranks}, mpi_comm=None)"
    )
    mine = others if RANK else first
    total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=mine)
    assert float(total) == mine.size()
    assert all(map(hvd.remove_process_set, (first, others)))


def check_variables_in_place():
    variables = [tf.Variable([float(RANK)]), keras.Variable(RANK)]
    found = hvd.broadcast_(variables, SIZE - 1)
    assert [v.numpy().tolist() for v in found] == [[SIZE - 1.0], SIZE - 1]
    variables[0].assign([float(RANK)])
    hvd.broadcast_variables(variables, 0, inplace=True)
    assert variables[0].numpy().tolist() == [0.0]
    with tf.Graph().as_default():
        w = tf1.get_variable("w", initializer=float(RANK))
        updated = hvd.broadcast_([w], SIZE - 1)
        with hvd.Session() as session:
            assert session.run(updated) == [SIZE - 1.0]
            assert session.run(w) == SIZE - 1.0


def check_a_function_that_broadcasts_objects():
    broadcast = hvd.broadcast_object_fn(root_rank=SIZE - 1)
    assert broadcast({"rank": RANK}) == {"rank": SIZE - 1}


def check_all_join():
    assert hvd.join() in range(SIZE)
    if SIZE > 1:
        refuses(
            hvd.CollectiveMismatchError,
            "the same number of steps" if RANK == 0 else "join",
            lambda: hvd.join() if RANK == 0 else hvd.allreduce(tf.constant(1.0)),
        )
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE


def check_local_sources():
    common, local = tf.Variable([1.0]), tf.Variable([1.0])

    def gradients(tape):
        tape.register_local_source(local)
        with tape:
            loss = (common[0] + local[0]) * (RANK + 1.0)
        return [g.numpy().item() for g in tape.gradient(loss, [common, local])]

    mean = (SIZE + 1) / 2
    wrapped = hvd.DistributedGradientTape(tf.GradientTape())
    np.testing.assert_allclose(gradients(wrapped), [mean, (RANK + 1) / SIZE])
    with wrapped:
        loss = (common[0] + local[0]) * (RANK + 1.0)
    own, others = wrapped.get_local_and_global_gradients(loss, [common, local])
    assert [source is local for source, _ in own] == [True]
    assert [source is common for source, _ in others] == [True]
    np.testing.assert_allclose(own[0][1], [(RANK + 1) / SIZE])
    np.testing.assert_allclose(others[0][1], [mean])
    whole = hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=False)
    np.testing.assert_allclose(gradients(whole), [mean, RANK + 1.0])


def check_sources_with_other_names():
    source = tf.Variable(RANK + 1.0, name=f"of_rank_{RANK}")
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = source * (RANK + 1.0)
    found = tape.gradient(loss, [source], use_generic_names=True)
    np.testing.assert_allclose(found, [(SIZE + 1) / 2])


def check_weights_that_are_not_broadcast():
    layers = [keras.layers.Dense(1, use_bias=False, trainable=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.compile("sgd", "mse")
    one = np.ones((1, 1))
    for local in (layers[0].kernel, layers[0].weights, None):
        for layer in layers:
            layer.set_weights([one * RANK])
        callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(
            SIZE - 1, local_variables=local
        )
        callback.register_local_var(layers[1].kernel)
        model.fit(one, one, callbacks=[callback], verbose=0)
        found = [float(weight[0, 0]) for weight in model.get_weights()]
        first = SIZE - 1 if local is None else RANK
        assert found == [first, RANK, SIZE - 1]
    refuses(
        ValueError,
        "no variable",
        lambda: hvd_keras.callbacks.BroadcastGlobalVariablesCallback(
            local_variables=["kernel"]
        ),
    )


def check_partly_distributed():
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    for layer in layers:
        layer.set_weights([np.ones((1, 1))])
    with hvd.PartialDistributedGradientTape(
        tf.GradientTape(), local_layers=layers[1]
    ) as tape:
        loss = tf.reduce_sum(model(tf.constant([[RANK + 1.0]])))
    found = tape.gradient(loss, model.trainable_variables)
    values = [float(g[0, 0]) for g in found]
    np.testing.assert_allclose(values, [(SIZE + 1) / 2, (RANK + 1) / SIZE])
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=[layers[1]]
    )
    ones = [tf.constant([[RANK + 1.0]])] * 2
    optimizer.apply(ones, model.trainable_variables)
    weights = [float(w[0, 0]) for w in model.get_weights()]
    np.testing.assert_allclose(weights, [1 - (SIZE + 1) / 2, 1 - (RANK + 1) / SIZE])
    empty = keras.layers.Dense(1)
    refuses(
        ValueError,
        "no weights yet",
        lambda: hvd.PartialDistributedGradientTape(
            tf.GradientTape(), local_layers=empty
        ),
    )


def check_normalization_by_all_rows():
    rows = np.random.default_rng(3).normal(size=(4 * SIZE, 2)).astype("float32") * 3
    own = tf.constant(rows[4 * RANK : 4 * RANK + 4])
    alone = keras.layers.BatchNormalization()
    expected = alone(rows, training=True)[4 * RANK : 4 * RANK + 4]
    for run in (lambda f: f, tf.function):
        layer = hvd.SyncBatchNormalization()
        layer.build(own.shape)
        found = run(lambda x, layer=layer: layer(x, training=True))(own)
        np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
        for mine, theirs in zip(layer.weights, alone.weights, strict=True):
            np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)


def check_loaded_models_are_distributed():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.save(f"model-{RANK}.keras")
    loaded = hvd_keras.load_model(f"model-{RANK}.keras")
    x = np.full((4, 2), RANK + 1.0)
    loaded.fit(x, x.sum(1), batch_size=4, verbose=0)
    weights = hvd.allgather_object(loaded.get_weights()[0])
    assert not np.array_equal(weights[0], model.get_weights()[0])
    assert all(np.array_equal(weights[0], theirs) for theirs in weights)


def check_the_best_model_is_written_by_rank_0():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    one = np.ones((4, 1))
    best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss")
    refuses(
        ValueError,
        "filepath",
        lambda: model.fit(one, one, verbose=0, callbacks=[best]),
    )
    best.filepath = f"best-{RANK}.keras"
    model.fit(one, one, verbose=0, callbacks=[best])
    assert Path(best.filepath).exists() == (RANK == 0)


def check_elastic_states():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.set_weights([np.full((2, 1), RANK + 1.0), np.zeros(1)])
    state = hvd_keras.elastic.KerasState(model, epoch=RANK, batch=0)
    seen = []
    state.register_reset_callbacks([lambda: seen.append("reset")])

    @hvd.elastic.run
    def train(state, words):
        np.testing.assert_array_equal(state.model.get_weights()[0], np.ones((2, 1)))
        assert state.epoch == 0
        model.set_weights([np.zeros((2, 1)), np.ones(1)])
        state.epoch = 7
        state.restore()
        np.testing.assert_array_equal(model.get_weights()[0], np.ones((2, 1)))
        assert state.epoch == 0
        state.epoch = 3
        state.commit()
        state.epoch = 4
        state.restore()
        return state.epoch, words

    assert train(state, "a") == (3, "a")
    state.on_reset()
    assert seen == ["reset"]
    x = np.ones((8, 2))
    model.fit(
        x,
        x[:, 0],
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[
            hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd_keras.elastic.UpdateBatchStateCallback(state),
            hvd_keras.elastic.UpdateEpochStateCallback(state),
        ],
    )
    assert (state.epoch, state.batch) == (5, 0)
    variable = tf.Variable([float(RANK)])
    plain = hvd.elastic.TensorFlowState([variable], step=RANK)
    plain.sync()
    assert (variable.numpy().tolist(), plain.step) == ([0.0], 0)
    refuses(ValueError, "variables=", lambda: hvd.elastic.TensorFlowState())


def check_timeline():
    hvd.start_timeline("timeline.json")
    hvd.allreduce(tf.constant(1.0), name="seen")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(tf.constant(1.0), name="unseen")
    if RANK == 0:
        found = json.loads(Path("timeline.json").read_text())
        assert [event["name"] for event in found] == ["allreduce (average) of seen"]
        assert found[0]["dur"] >= 0


if __name__ == "__main__":
    checks.run(globals())

# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""TensorFlow 1 graphs and sessions, on every rank."""

import json
import os
from unittest import mock

import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs import checks
from tests.runtime.programs.api_data import (
    OPERATIONS,
    combined,
    of_rank,
    refuses,
    same,
)
from tests.runtime.programs.checks import RANK, SIZE

tf1 = tf.compat.v1
tfc.init()


def in_graph(build, feed=None):
    """Run what ``build`` returns in a ``tfc.Session``."""
    with tf.Graph().as_default():
        fetches = build()
        with tfc.Session() as session:
            return session.run(fetches, feed)


def check_allreduce_in_a_graph():
    dtypes = ("float16", "bfloat16", "float32", "float64", "int32", "uint8", "bool")
    for dtype in dtypes:
        op = tfc.Max if dtype == "bool" else tfc.Average
        parts = [of_rank(rank, (3, 2), dtype) for rank in range(SIZE)]

        def build(own=parts[RANK], op=op):
            tensor = tf.constant(own)
            total = tfc.allreduce(tensor, op=op)
            assert total.shape == (3, 2)
            rest = tfc.allgather(tensor), tfc.broadcast(tensor, SIZE - 1)
            return total, *rest, tfc.reducescatter(tensor, op=op)

        total, rows, root, part = in_graph(build)
        expected = combined("max" if dtype == "bool" else "average", parts)
        same(tf.constant(total), expected, dtype)
        np.testing.assert_array_equal(rows, np.concatenate(parts))
        np.testing.assert_array_equal(root, parts[-1])
        assert len(part) == 3 // SIZE + (RANK < 3 % SIZE)


def check_allreduce_gradients_in_a_graph():
    """Equal to eager gradients, which are checked against finite differences."""
    own = of_rank(RANK, (2 * SIZE + 1, 2), "float64")

    def gradients(act, x):
        result = act(x)
        weights = tf.reshape(tf.range(tf.size(result)), tf.shape(result))
        return tf.reduce_sum(result * tf.cast(weights % 7 + RANK, tf.float64))

    for name, act in OPERATIONS.items():
        x = tf.constant(own)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = gradients(act, x)
        expected = tape.gradient(value, x).numpy()

        def build(act=act):
            x = tf.constant(own)
            return tf1.gradients(gradients(act, x), x)[0]

        np.testing.assert_allclose(in_graph(build), expected, err_msg=name)


def check_slices_in_a_graph():
    def build():
        rows = tf.fill([RANK, 2], 1.0)
        slices = tf.IndexedSlices(rows, tf.range(RANK), tf.constant([SIZE, 2]))
        return tf.convert_to_tensor(tfc.allreduce(slices, average=False))

    expected = [[float(SIZE - 1 - row)] * 2 for row in range(SIZE)]
    np.testing.assert_array_equal(in_graph(build), expected)


def check_order_in_graphs():
    """Many exchanges that do not depend on each other, run repeatedly."""
    with tf.Graph().as_default():
        own = tf1.placeholder(tf.float32, [])
        # Built in the same order but run in any order: the later ones take less time.
        sides = [16 * (8 - i) for i in range(8)]
        work = [tf.linalg.svd(tf.eye(n) + own, compute_uv=False) for n in sides]
        sums = [
            tfc.allreduce(tf.reduce_sum(w) * 0 + i + own, op=tfc.Sum)
            for i, w in enumerate(work)
        ]
        with tfc.Session() as session:
            for _ in range(10):
                found = session.run(sums, {own: float(RANK)})
                total = sum(range(SIZE))
                assert found == [i * SIZE + total for i in range(8)]
            # Some of them only, and in a different order on odd ranks.
            assert session.run(sums[5], {own: 0.0}) == 5 * SIZE
            chosen = sums[3:5] if RANK % 2 else sums[3:5][::-1]
            assert sorted(session.run(chosen, {own: 0.0})) == [3 * SIZE, 4 * SIZE]


def check_more_exchanges_than_threads():
    """All exchanges wait at the same time, in a session with one or two threads."""
    for threads in (1, 2):
        config = tf1.ConfigProto(
            inter_op_parallelism_threads=threads, use_per_session_threads=True
        )
        with tf.Graph().as_default():
            own = tf1.placeholder(tf.float32, [])
            sums = [tfc.allreduce(own * i, op=tfc.Sum) for i in range(24)]
            means = tfc.grouped_allreduce([own, own])
            gathered = tfc.allgather(own[None])
            # TensorFlow's own class, which unmodified programs use.
            with tf1.Session(config=config) as session:
                for _ in range(3):
                    chosen = sums if RANK % 2 else sums[::-1]
                    found = session.run([chosen, means, gathered], {own: RANK + 1.0})
                    total = sum(range(SIZE + 1))
                    assert sorted(found[0]) == [total * i for i in range(24)]
                    assert found[1] == [total / SIZE] * 2
                    assert found[2].tolist() == [r + 1.0 for r in range(SIZE)]


def check_order_names_are_keys():
    """Ops that are created in different orders, some of them with the same name."""
    with tf.Graph().as_default():
        names = ["a", "b", "c"]
        sums = {
            name: tfc.allreduce(tf.constant(float(i)), op=tfc.Sum, name=name)
            for i, name in sorted(enumerate(names), reverse=bool(RANK % 2))
        }
        twice = [tfc.allgather(tf.constant([i]), "a") for i in range(2)]
        with tfc.Session() as session:
            found = session.run(sums)
            assert found == {"a": 0.0, "b": SIZE, "c": 2.0 * SIZE}
            assert [each.tolist() for each in session.run(twice)] == [
                [0] * SIZE,
                [1] * SIZE,
            ]
            # The name that appears in TensorFlow's own messages.
            assert session.graph.get_operation_by_name("allreduce_of_a")


def check_after_a_mismatch_all_go_on():
    if SIZE == 1:
        return
    with tf.Graph().as_default():
        wrong = tfc.allreduce(tf.ones([2 + (RANK == 0)]), name="wrong")
        others = [tfc.allreduce(tf.constant(1.0), op=tfc.Sum) for _ in range(8)]
        for kind in (tfc.Session, tf1.Session):
            with kind() as session:
                for _ in range(3):
                    refuses(
                        tfc.CollectiveMismatchError,
                        "allreduce (average) of wrong",
                        lambda session=session: session.run([wrong, others]),
                    )
                    assert session.run(others) == [SIZE] * 8


def check_functions_in_a_graph():
    @tf.function
    def twice(x):
        return tfc.allreduce(tfc.allreduce(x, op=tfc.Sum), op=tfc.Sum)

    found = in_graph(lambda: (twice(tf.constant(1.0)), tfc.allreduce(tf.constant(3.0))))
    assert found == (SIZE * SIZE, 3.0)


OPTIMIZERS = {
    "adam": lambda: tf1.train.AdamOptimizer(0.05),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
}


def trained(make, whole, distributed):
    """Weights and slots after five steps of regression on all rows or this rank's."""
    rows = np.random.default_rng(7).normal(size=(4 * SIZE, 3))
    own = rows if whole else rows[4 * RANK : 4 * RANK + 4]
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float64, [None, 3])
        for resource in (True, False):
            with tf1.variable_scope(f"scope{resource}", use_resource=resource):
                w = tf1.get_variable(
                    "w", [3, 1], tf.float64, initializer=tf1.ones_initializer()
                )
                tf1.get_variable("frozen", [2], initializer=tf1.zeros_initializer())
            loss = tf.reduce_mean((x @ w - tf.reduce_sum(x, 1, True) * 2 + 1) ** 2)
            tf1.add_to_collection("losses", loss)
        optimizer = make()
        if distributed:
            optimizer = tfc.DistributedOptimizer(optimizer)
            assert optimizer.get_name() == f"Distributed{type(make()).__name__}"
        train = optimizer.minimize(tf.add_n(tf1.get_collection("losses")))
        variables = tf1.trainable_variables()
        slots = [
            optimizer.get_slot(variable, name)
            for variable in variables
            for name in optimizer.get_slot_names()
        ]
        with tfc.Session() as session:
            for _ in range(5):
                session.run(train, {x: own})
            used = [s for s in slots if s is not None]
            return session.run([*variables, *used]), [v.op.name for v in used]


def check_training_old_optimizers():
    for make in OPTIMIZERS.values():
        expected, names = trained(make, whole=True, distributed=False)
        found, own_names = trained(make, whole=False, distributed=True)
        assert own_names == names
        assert names
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-6, 1e-9)


def check_optimizer_delegates():
    inner = tf1.train.AdamOptimizer(0.1)
    optimizer = tfc.DistributedOptimizer(inner, "mine", use_locking=True)
    assert isinstance(optimizer, tf1.train.Optimizer)
    assert optimizer.get_name() == "mine"
    assert optimizer._valid_dtypes() == inner._valid_dtypes()
    assert optimizer.get_slot_names() == inner.get_slot_names()
    assert optimizer.variables() == inner.variables() == []
    refuses(
        ValueError,
        "for Keras",
        lambda: tfc.DistributedOptimizer(inner, backward_passes_per_step=2),
    )


def check_session_api():
    with tf.Graph().as_default() as graph:
        w = tf1.get_variable("w", [2], initializer=tf1.random_normal_initializer())
        local = tf1.get_variable(
            "local", initializer=3.0, collections=[tf1.GraphKeys.LOCAL_VARIABLES]
        )
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a"], [7]), -1
        )
        looked = table.lookup(tf.constant(["a", "b"]))
        share = tfc.broadcast_global_variables(SIZE - 1)
        own = tf1.ConfigProto(allow_soft_placement=True, intra_op_parallelism_threads=1)
        operations = len(graph.get_operations())
        with tfc.Session(graph=graph, config=own) as session:
            assert len(graph.get_operations()) == operations
            assert session.run(local) == 3.0
            assert session.run(looked).tolist() == [7, -1]
            drawn = tfc.allgather_object(session.run(w))
            session.run(share)
            np.testing.assert_array_equal(session.run(w), drawn[-1])
    with tf.Graph().as_default(), tfc.Session() as session:
        assert session.graph is tf1.get_default_graph()
    config = tfc.session_config(own)
    assert config is not own
    assert config.allow_soft_placement
    assert config.intra_op_parallelism_threads == 1
    assert config.inter_op_parallelism_threads > 8
    chosen = tf1.ConfigProto(inter_op_parallelism_threads=5, device_filters=["/job:a"])
    assert tfc.session_config(chosen) == chosen


def check_session_ranks_can_be_fetched():
    with tfc.Session() as session:
        assert session.run(tfc.rank()) == RANK
        total = tfc.allreduce(tf.constant(1.0), op=tfc.Sum)
        found = session.run({"who": [tfc.rank(), tfc.size()], "total": total})
        assert found == {"who": [RANK, SIZE], "total": SIZE}
        assert session.run([tfc.rank_op(), tfc.size()]) == [RANK, SIZE]


def check_session_gpu():
    """The GPU of this local rank, or the first if the launcher has assigned GPUs."""
    for gpus, expected in ((0, ""), (1, "0"), (3, str(RANK % 3)), (8, str(RANK))):
        with mock.patch.object(
            tf.config, "list_physical_devices", return_value=[0] * gpus
        ):
            config = tfc.session_config()
            assert config.gpu_options.visible_device_list == expected
            chosen = tf1.ConfigProto()
            chosen.gpu_options.visible_device_list = "7"
            kept = tfc.session_config(chosen).gpu_options
            assert kept.visible_device_list == "7"


def check_session_hook():
    with tf.Graph().as_default():
        w = tf1.get_variable("w", initializer=float(RANK))
        step = tf1.train.create_global_step()
        train = tf1.assign_add(step, 1)
        hooks = [
            tfc.BroadcastGlobalVariablesHook(SIZE - 1),
            tf1.train.StopAtStepHook(last_step=3),
        ]
        with tf1.train.MonitoredTrainingSession(
            hooks=hooks, config=tfc.session_config(), checkpoint_dir=None
        ) as session:
            seen = []
            while not session.should_stop():
                seen.append(session.run([w, train])[0])
        assert seen == [float(SIZE - 1)] * 3


def check_session_cluster():
    config = json.loads(os.environ["TF_CONFIG"])
    assert tfc.cluster_spec() == tf.train.ClusterSpec(config["cluster"])
    assert tfc.device_filters() == []
    server = tfc.server()
    task = config["task"]
    address = config["cluster"][task["type"]][task["index"]]
    assert server.target == f"grpc://{address}"
    with tf.Graph().as_default():
        device = f"/job:{task['type']}/task:{task['index']}"
        with tf.device(device):
            w = tf1.get_variable("w", initializer=1.0 + RANK)
            mean = tfc.allreduce(w)
        own = tf1.ConfigProto(device_filters=[device])
        with tfc.Session(server.target, config=own) as session:
            assert not session.run(tf1.is_variable_initialized(w))
            session.run(w.initializer)
            assert session.run(mean) == (SIZE + 1) / 2


def check_errors_of_a_session():
    if SIZE == 1:
        return

    def build():
        return tfc.allreduce(tf.ones([2 + RANK]), name="weights")

    refuses(tfc.CollectiveMismatchError, "tensor float32 (2)", lambda: in_graph(build))


if __name__ == "__main__":
    checks.run(globals())

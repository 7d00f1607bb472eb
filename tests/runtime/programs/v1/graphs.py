# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any

"""TensorFlow 1 graphs in a cluster; prints a line of JSON for each case."""

import json
import random
import re
import sys
import threading
from pathlib import Path

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))
from cluster import Cluster, stacks_after  # type: ignore[import-not-found]  # a script finds it beside itself

from tfcluster.runtime import v1

tf1 = tf.compat.v1
if sys.argv[1] == "references":
    tf1.disable_v2_behavior()
else:
    tf1.disable_eager_execution()
LEARNING_RATE = 0.5
SHAPE = [4, 3]


def weighted(values):
    """A loss whose gradient with respect to w is ``values[tower]`` everywhere."""

    def loss(tower):
        w = tf1.get_variable("w", SHAPE, initializer=tf1.ones_initializer())
        return tf1.reduce_sum(w * values[tower])

    return loss


def sgd():
    return tf1.train.GradientDescentOptimizer(LEARNING_RATE)


def begin(session, workers, meet):
    """The chief initialises the global variables, and the others wait for it."""
    if workers.is_chief:
        session.run(tf1.global_variables_initializer())
    session.run(tf1.local_variables_initializer())
    meet.wait(60)


def one_step(cluster, build):
    """The values of the master and its copies after one step of each worker."""
    meet = threading.Barrier(len(cluster.workers))

    def act(rank, workers):
        training = build(rank, workers)
        with cluster.session(rank) as session:
            begin(session, workers, meet)
            if training.sync_initial is not None:
                session.run(training.sync_initial)
            meet.wait(60)
            session.run(training.train_op)
            meet.wait(60)
            own = [
                session.run(variable)
                for variable in tf1.local_variables()
                if variable.name.startswith("tower")
            ]
            return {
                "w": float(session.run(training.masters[0])[0, 0]),
                "own": [float(value[0, 0]) for value in own],
                "step": int(session.run(training.global_step)),
                "barriers": training.barriers,
            }

    return cluster.run(act)


# --- cases --------------------------------------------------------------------------


def barrier(cluster):
    """The largest difference in steps between workers with random delays."""
    steps, count = 25, len(cluster.workers)
    begun, ahead, behind = [0] * count, [], []

    def act(rank, workers):
        barriers = v1.Barriers(workers)
        barrier = barriers.after("b2", [])
        delays = random.Random(rank)
        with cluster.session(rank) as session:
            for _ in range(steps):
                threading.Event().wait(delays.choice([0, 0, 0.001, 0.02]))
                begun[rank] += 1
                session.run(barrier.op)
                ahead.append(begun[rank] - min(begun))
                behind.append(max(begun) - begun[rank])
        return session.graph is not None

    cluster.run(act)
    return {"begun": begun, "ahead": max(ahead), "behind": max(behind)}


def barrier_devices(cluster):
    workers = cluster.members()[0]
    with tf.Graph().as_default() as graph:
        barriers = v1.Barriers(workers)
        for name in "abc":
            barriers.after(name, [])
        queues = [op for op in graph.get_operations() if "FIFOQueue" in op.type]
        return {
            "devices": [op.device for op in queues],
            "names": [op.get_attr("shared_name").decode() for op in queues],
        }


def barrier_alone(cluster):
    workers = v1.Workers({"worker": ("a:1",), "ps": ("b:1",)}, "worker", 0)
    with tf.Graph().as_default() as graph:
        barrier = v1.Barriers(workers).after("alone", [])
        types = sorted({op.type for op in graph.get_operations()})
        with tf1.Session() as session:
            session.run(barrier.op)
    return types


def variable_devices(cluster):
    """The devices of variables and slots."""
    workers = cluster.members()[1]
    with tf.Graph().as_default():
        training = v1.parameter_server_graph(
            weighted([1.0]), tf1.train.AdamOptimizer(), workers=workers
        )
        found = {v.op.name: v.device for v in tf1.global_variables()}
        return {"devices": found, "masters": [v.op.name for v in training.masters]}


def variable_caching(cluster):
    workers = cluster.members()[0]
    errors = []
    for options in ({"caching": "tpu"}, {"towers": ["here"]}):
        with tf.Graph().as_default():
            try:
                v1.parameter_server_graph(
                    weighted([1.0]), sgd(), workers=workers, **options
                )
            except ValueError as error:
                errors.append(str(error))
    with tf.Graph().as_default():
        v1.parameter_server_graph(
            weighted([1.0, 1.0]),
            sgd(),
            workers=workers,
            towers=["gpu:0", "gpu:1"],
            caching="gpu",
            caching_threshold_bytes=1,
        )
        (cached,) = {v._caching_device for v in tf1.trainable_variables()}
    return {"errors": errors, "gpu": cached}


def placement_balance(cluster):
    """Balance of VGG-16's variables on two parameter servers."""
    layers = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)]
    layers += [(256, 256), (256, 512)] + [(512, 512)] * 5
    shapes = [[3, 3, a, b] for a, b in layers]
    shapes += [[25088, 4096], [4096, 4096], [4096, 1000]]
    found = {}
    for name, parts in (("whole", 1), ("divided", 2)):
        with tf.Graph().as_default():
            placed = v1.ByBytes(2)
            setter = tf1.train.replica_device_setter(
                cluster=cluster.spec, ps_strategy=placed
            )
            with (
                tf1.device(setter),
                tf1.variable_scope(
                    "vgg", partitioner=tf1.fixed_size_partitioner(parts)
                ),
            ):
                for number, shape in enumerate(shapes):
                    tf1.get_variable(f"kernel{number}", shape)
                    tf1.get_variable(
                        f"bias{number}", shape[-1:], partitioner=lambda **_: [1]
                    )
            actual = [0, 0]
            for v in tf1.global_variables():
                count = int(np.prod(v.shape.as_list()))
                actual["task:1" in v.device] += 4 * count
            found[name] = {
                "held": placed.bytes_held,
                "actual": actual,
                "warning": placed.warning,
            }
    return found


def accumulated_sums(cluster):
    return one_step(
        cluster,
        lambda rank, workers: v1.parameter_server_graph(
            weighted([rank + 1.0]), sgd(), workers=workers
        ),
    )


def accumulated_mean(cluster):
    return one_step(
        cluster,
        lambda rank, workers: v1.parameter_server_graph(
            weighted([rank + 1.0]), sgd(), workers=workers, mean=True
        ),
    )


def accumulated_sparse_mean(cluster):
    """Each embedding row's mean is over the workers that have a gradient for it."""
    meet = threading.Barrier(len(cluster.workers))

    def act(rank, workers):
        def loss(tower):
            table = tf1.get_variable("t", [4, 2], initializer=tf1.zeros_initializer())
            return tf1.reduce_sum(tf1.gather(table, [0, rank + 1]))

        training = v1.parameter_server_graph(loss, sgd(), workers=workers, mean=True)
        with cluster.session(rank) as session:
            begin(session, workers, meet)
            session.run(training.train_op)
            meet.wait(60)
            return session.run(training.masters[0])[:, 0].tolist()

    return cluster.run(act)


def variable_reads(cluster):
    """How often a step of two towers fetches w, with cached copies and without."""
    workers, towers = cluster.members()[0], ["cpu:0", "cpu:1"]

    def loss(tower):
        w = tf1.get_variable("w", SHAPE, initializer=tf1.ones_initializer())
        return tf1.reduce_sum(w * w * (tower + 2.0))

    def cached():
        return v1.parameter_server_graph(
            loss, sgd(), workers=workers, towers=towers, barrier=False
        ).train_op

    def plain():
        losses = []
        for tower in range(2):
            device = f"{workers.device}/device:CPU:{tower}"
            setter = tf1.train.replica_device_setter(
                cluster=cluster.spec, worker_device=device
            )
            with (
                tf1.device(setter),
                tf1.variable_scope("", reuse=tf1.AUTO_REUSE),
            ):
                losses.append(loss(tower))
        return sgd().minimize(tf1.add_n(losses))

    return {build.__name__: fetches(cluster, build) for build in (cached, plain)}


def fetches(cluster, build):
    """The number of times a step's worker fetches w from the parameter servers."""
    with tf.Graph().as_default():
        step = build()
        with cluster.session(0) as session:
            session.run(tf1.global_variables_initializer())
            session.run(tf1.local_variables_initializer())
            metadata = tf1.RunMetadata()
            session.run(
                step,
                options=tf1.RunOptions(output_partition_graphs=True),
                run_metadata=metadata,
            )
    names = [
        node.attr["tensor_name"].s.decode()
        for graph in metadata.partition_graphs
        for node in graph.node
        if node.op == "_Recv"
        and "/job:ps" in node.attr["send_device"].s.decode()
        and "/job:worker" in node.attr["recv_device"].s.decode()
    ]
    # A control dependency on another task also sends a tensor, which does not count.
    fetched = re.compile(r"edge_\d+_(w|w/read|.*ReadVariableOp.*)")
    return sum(bool(fetched.fullmatch(name)) for name in names)


def towers_of_one_worker(cluster):
    """Two towers with gradients 1 and 5: the mean is 3, not 1 or 6."""
    return {
        "parameter_server": one_step(
            cluster,
            lambda rank, workers: v1.parameter_server_graph(
                weighted([1.0, 5.0]), sgd(), workers=workers, towers=["cpu:0", "cpu:1"]
            ),
        ),
        "replicated": one_step(
            cluster,
            lambda rank, workers: v1.replicated_graph(
                weighted([1.0, 5.0]), sgd(), workers=workers, towers=["cpu:0", "cpu:1"]
            ),
        ),
    }


def workers_in_step(cluster):
    """No worker begins a step before all workers have applied the previous one."""
    steps, meet, seen = 10, threading.Barrier(len(cluster.workers)), []

    def act(rank, workers):
        training = v1.parameter_server_graph(weighted([1.0]), sgd(), workers=workers)
        delays = random.Random(rank)
        with cluster.session(rank) as session:
            begin(session, workers, meet)
            for step in range(steps):
                threading.Event().wait(delays.choice([0, 0.02]))
                session.run(training.train_op)
                seen.append(int(session.run(training.global_step)) - (step + 1) * 3)
        return

    cluster.run(act)
    return [min(seen), max(seen)]


def replicated(cluster):
    """Copies equal the masters after every step, with two towers and momentum."""
    meet = threading.Barrier(len(cluster.workers))

    def act(rank, workers, mean=False):
        numbers = np.random.RandomState(rank)
        x = tf1.placeholder(tf.float32, [None, 5])

        def loss(tower):
            start = tf1.random_normal_initializer(seed=3)
            hidden = tf1.get_variable("a/w", [5, 4], initializer=start)
            out = tf1.get_variable("b/w", [4, 1], initializer=start)
            return tf1.reduce_mean((x @ hidden @ out - tower) ** 2)

        training = v1.replicated_graph(
            loss,
            tf1.train.MomentumOptimizer(0.01, 0.9),
            workers=workers,
            towers=["cpu:0", "cpu:1"],
            mean=mean,
        )
        copies = [
            [v for v in tf1.local_variables() if v.op.name == f"tower{t}/{m.op.name}"]
            for m in training.masters
            for t in range(2)
        ]
        with cluster.session(rank) as session:
            begin(session, workers, meet)
            session.run(training.sync_initial)
            meet.wait(60)
            equal, moved = [], []
            before = session.run(training.masters[0])
            for _ in range(8):
                session.run(training.train_op, {x: numbers.normal(size=[6, 5])})
                meet.wait(60)
                master = session.run(list(training.masters))
                own = session.run([found[0] for found in copies])
                equal.append(
                    all(
                        np.array_equal(own[2 * i + t], value)
                        for i, value in enumerate(master)
                        for t in range(2)
                    )
                )
                moved.append(not np.array_equal(master[0], before))
                before = master[0]
                meet.wait(60)
            last = [value.tolist() for value in master]
        return {
            "equal": equal,
            "moved": moved,
            "last": last,
            "barriers": training.barriers,
            "slots": [
                v.device
                for v in tf1.global_variables()
                if v.op.name.endswith("Momentum")
            ],
        }

    return cluster.run(act)


def replicated_mean(cluster):
    return one_step(
        cluster,
        lambda rank, workers: v1.replicated_graph(
            weighted([rank + 1.0]), sgd(), workers=workers, mean=True
        ),
    )


def copies_by_name(cluster):
    """A tower with a renamed layer, and a variable not created by ``get_variable``."""
    errors = []

    def renamed(tower):
        name = "dense" if tower == 0 else "dense_1"
        return tf1.reduce_sum(tf1.get_variable(f"{name}/kernel", [2]))

    def strange(tower):
        return tf1.reduce_sum(tf1.Variable([1.0, 2.0], name="stray"))

    for loss in (renamed, strange):
        with tf.Graph().as_default():
            try:
                v1.replicated_graph(
                    loss,
                    sgd(),
                    workers=cluster.members()[0],
                    towers=["cpu:0", "cpu:1"],
                )
            except v1_error() as error:
                errors.append(str(error))
    return errors


def v1_error():
    from tfcluster.runtime import CollectiveMismatchError

    return CollectiveMismatchError


def normalised(x, rank):
    """A model with moving averages, as TensorFlow 1 layers kept them."""

    def loss(tower):
        w = tf1.get_variable("w", [3, 1], initializer=tf1.ones_initializer())
        mean = tf1.get_variable(
            "norm/moving_mean",
            [3],
            initializer=tf1.zeros_initializer(),
            trainable=False,
            collections=[
                tf1.GraphKeys.GLOBAL_VARIABLES,
                tf1.GraphKeys.MODEL_VARIABLES,
            ],
        )
        batch = tf1.reduce_mean(x, 0)
        update = mean.assign(0.5 * mean + 0.5 * batch)
        with tf1.control_dependencies([update]):
            return tf1.reduce_mean(tf1.square((x - batch) @ w - rank))

    return loss


def model_variables(cluster):
    """The ps holds the chief's moving averages; late workers begin with them."""
    meet = threading.Barrier(len(cluster.workers))

    def act(rank, workers):
        x = tf1.placeholder(tf.float32, [None, 3])
        training = v1.replicated_graph(normalised(x, rank), sgd(), workers=workers)
        (own,) = (v for v in tf1.model_variables() if v.op.name.startswith("tower0"))
        master_copy = training.masters[-1]
        with cluster.session(rank) as session:
            begin(session, workers, meet)
            session.run(training.sync_initial)
            meet.wait(60)
            for _ in range(3):
                session.run(training.train_op, {x: np.full([2, 3], rank + 1.0)})
            before = session.run(master_copy)[0]
            meet.wait(60)
            if training.sync_model_variables is not None:
                session.run(training.sync_model_variables)
            meet.wait(60)
            found = {
                "name": master_copy.op.name,
                "trained": master_copy in tf1.trainable_variables(),
                "before": float(before),
                "own": float(session.run(own)[0]),
                "master_copy": float(session.run(master_copy)[0]),
                "syncs": training.sync_model_variables is not None,
            }
            # Do the same as a worker that joins late.
            session.run(tf1.local_variables_initializer())
            fresh = float(session.run(own)[0])
            session.run(training.sync_initial)
            masters = session.run(list(training.masters))
            locals_ = {v.op.name: v for v in tf1.local_variables()}
            same = [
                np.array_equal(session.run(locals_[f"tower0/{m.op.name}"]), value)
                for m, value in zip(training.masters, masters, strict=True)
            ]
            return {**found, "fresh": fresh, "late": same}

    return cluster.run(act)


def number_of_barriers(cluster):
    """The number of barriers per step does not grow with the number of variables."""
    found = []
    for count in (1, 20):

        def loss(tower, count=count):
            return tf1.add_n(
                [tf1.reduce_sum(tf1.get_variable(f"v{i}", [2])) for i in range(count)]
            )

        with tf.Graph().as_default() as graph:
            training = v1.replicated_graph(loss, sgd(), workers=cluster.members()[0])
            dequeues = [op for op in graph.get_operations() if "Dequeue" in op.type]
            found.append([training.barriers, len(dequeues)])
    return found


def other_models(cluster):
    """The second worker has renamed a layer; its error says what differs."""

    def act(rank, workers):
        def loss(tower):
            name = "dense" if rank != 1 else "dense_1"
            return tf1.reduce_sum(tf1.get_variable(f"{name}/kernel", [2, 3]))

        training = v1.replicated_graph(loss, sgd(), workers=workers)
        try:
            with tf1.train.MonitoredTrainingSession(
                cluster.workers[rank].target,
                is_chief=workers.is_chief,
                hooks=[training.hook],
                config=tf1.ConfigProto(
                    device_filters=["/job:ps", f"/job:worker/task:{rank}"]
                ),
            ):
                return "trains"
        except v1_error() as error:
            return str(error)

    return cluster.run(act)


def together(cluster):
    """Workers stop at different steps; no worker waits for one that has left.

    Runs one graph after the other on the same parameter servers.
    """
    found = {}
    for name, build, mean in (
        ("sums", v1.parameter_server_graph, False),
        ("mean", v1.parameter_server_graph, True),
        ("replicated", v1.replicated_graph, False),
        ("replicated_mean", v1.replicated_graph, True),
    ):

        def act(rank, workers, name=name, build=build, mean=mean):
            training = build(
                weighted([1.0]), sgd(), workers=workers, mean=mean, name=name
            )
            steps = 0
            with tf1.train.MonitoredTrainingSession(
                cluster.workers[rank].target,
                is_chief=workers.is_chief,
                hooks=[training.hook],
                config=tf1.ConfigProto(
                    device_filters=["/job:ps", f"/job:worker/task:{rank}"],
                    operation_timeout_in_ms=60000,
                ),
            ) as session:
                # The second worker leaves after three steps.
                while not session.should_stop() and not (rank == 1 and steps == 3):
                    session.run(training.train_op)
                    steps += 1
            return steps

        found[name] = cluster.run(act)
    return found


def shared_name(cluster):
    """Two sessions on two servers share a queue by its name."""

    def queue():
        with tf1.device("/job:ps/task:1"):
            return tf1.FIFOQueue(10, [tf.int32], shapes=[[]], shared_name="numbers")

    with tf.Graph().as_default():
        put = queue().enqueue_many([[3, 1, 4]])
        with cluster.session(0) as session:
            session.run(put)
    with tf.Graph().as_default():
        take = queue().dequeue_many(3)
        with cluster.session(1) as session:
            return session.run(take).tolist()


TWO = {
    "accumulated_sums",
    "accumulated_mean",
    "accumulated_sparse_mean",
    "towers_of_one_worker",
    "replicated_mean",
}


def main(names):
    stacks_after(100)
    clusters = []
    for name in names:
        # A new cluster: parameter servers keep resources of graphs with the same names.
        clusters.append(Cluster(2, 2 if name in TWO else 3))
        print(json.dumps([name, globals()[name](clusters[-1])]), flush=True)


main(sys.argv[2:])

# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any

"""TensorFlow 1 scripts that know nothing of tfcluster: script.py NAME.

Each script prints what it has seen in lines that begin with its name.
"""

import json
import os
import sys
from pathlib import Path

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

NAME = sys.argv[1]
CONFIG = json.loads(os.environ["TF_CONFIG"])
TASK = CONFIG["task"]["type"], CONFIG["task"]["index"]


def say(**found):
    # One write: TensorFlow's threads write to stderr, which goes to the same log.
    print(f"{NAME} {json.dumps(found)}\n", end="", flush=True)


def graph(width=3):
    """One variable, which each step decreases by 1."""
    with tf.device(tf.train.replica_device_setter()):
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable("w", [width], initializer=tf.zeros_initializer())
        loss = tf.reduce_sum(w)
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss, step)
    return step, w, train


def monitored():
    """Only a MonitoredTrainingSession: the chief, its files, and the devices."""
    step, w, train = graph()
    hooks = [tf.train.StopAtStepHook(last_step=40)]
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir="checkpoints" + str(TASK[1]), hooks=hooks
    ) as session:
        while not session.should_stop():
            now = session.run([step, train])[0]
    say(w=w.device, step_on=step.device, train_on=train.device, last=int(now))


def waits():
    """Like ``monitored``, but trains until the file ``end`` exists."""
    step, _, train = graph()
    with tf.train.MonitoredTrainingSession() as session:
        say(begun=int(session.run(step)))
        while not Path("end").exists():
            session.run(train)


def other_model():
    graph(width=3 if TASK[1] == 0 else 4)
    with tf.train.MonitoredTrainingSession():
        say(trains=True)


def undistributed():
    w = tf.get_variable("w", [3])
    tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(w))
    with tf.train.MonitoredTrainingSession():
        say(trains=True)


def servers():
    """Starts several servers for its own task, and uses plain sessions."""
    spec = tf.train.ClusterSpec(CONFIG["cluster"])
    first = tf.train.Server(spec, job_name=TASK[0], task_index=TASK[1])
    again = tf.distribute.Server(
        CONFIG["cluster"], job_name=TASK[0], task_index=TASK[1]
    )
    third = tf.train.Server(first.server_def)
    local = tf.train.Server.create_local_server()
    with tf.device(tf.train.replica_device_setter(cluster=spec)):
        counter = tf.get_variable("counter", initializer=0)
        count = tf.assign_add(counter, 1, use_locking=True)
    with tf.Session(first.target) as session:
        session.run(counter.initializer)
        counted = [int(session.run(count))]
        filters = list(session._config.device_filters)
    for target in (again.target, third.target):
        config = tf.ConfigProto(allow_soft_placement=True)
        with tf.Session(target, config=config) as session:
            counted.append(int(session.run(count)))
    say(
        same=len({first.target, again.target, third.target}),
        local=local.target != first.target,
        counted=counted,
        filters=filters,
        own=list(config.device_filters),
        job=again.server_def.job_name,
    )


def says_chief():
    """The old rule: task 0 is the chief, whatever its type."""
    _, _, train = graph()

    class OfTheChief(tf.train.SessionRunHook):
        def begin(self):
            say(initialises=True)

    say(initialises=False)
    with tf.train.MonitoredTrainingSession(
        is_chief=TASK[1] == 0, chief_only_hooks=[OfTheChief()]
    ) as session:
        session.run(train)


def own_choices():
    """Devices that the script chooses take precedence."""
    with tf.device(
        tf.train.replica_device_setter(
            worker_device="/job:worker/task:7",
            ps_tasks=2,
            ps_strategy=lambda op: 1,
        )
    ):
        w = tf.get_variable("w", [3])
        x = w + 1
    with tf.device(tf.train.replica_device_setter()):
        big = tf.get_variable("big", [1000])
        small = [tf.get_variable(f"small{i}", [100]) for i in range(3)]
    say(w=w.device, x=x.device, big=big.device, small=[v.device for v in small])


def supervised():
    """Uses a Supervisor, as scripts did before MonitoredTrainingSession."""
    step, _, train = graph()
    server = tf.train.Server(CONFIG["cluster"], job_name=TASK[0], task_index=TASK[1])
    supervisor = tf.train.Supervisor(
        is_chief=TASK[1] == 0,
        init_op=tf.global_variables_initializer(),
        global_step=step,
        recovery_wait_secs=1,
    )
    with supervisor.prepare_or_wait_for_session(server.target) as session:
        session.run(train)
        say(step=int(session.run(step)))


def joins():
    """In-graph replication by the chief; the other worker is only a server."""
    server = tf.train.Server(CONFIG["cluster"], job_name=TASK[0], task_index=TASK[1])
    if TASK[1] != 0:
        say(serves=True)
        server.join()
        say(ended=True)
        return
    config = tf.ConfigProto(device_filters=["/job:ps", "/job:worker"])
    in_graph(server.target, config, "/job:worker/task:%d", 2)


def in_graph(target, config, device, count):
    with tf.device("/job:ps/task:0"):
        w = tf.get_variable("w", [3], initializer=tf.zeros_initializer())
    losses = []
    for index in range(count):
        with tf.device(device % index):
            losses.append(tf.reduce_sum(w * (index + 1.0)))
    train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.add_n(losses))
    with tf.Session(target, config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        say(w=session.run(w).tolist(), on=[loss.device for loss in losses])


def whole_graph():
    """Only the chief runs the script; the workers are built-in servers."""
    server = tf.train.Server(CONFIG["cluster"], job_name=TASK[0], task_index=TASK[1])
    in_graph(server.target, None, "/job:worker/task:%d", 2)


def synchronous():
    """Each step applies the mean of the two workers' gradients, which differ."""
    with tf.device(tf.train.replica_device_setter()):
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable("w", [3], initializer=tf.zeros_initializer())
        optimizer = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(1.0), 2, 2
        )
        train = optimizer.minimize(tf.reduce_sum(w) * (1.0 + TASK[1]), step)
    sync = optimizer.make_session_run_hook(TASK[1] == 0, num_tokens=0)
    stop = tf.train.StopAtStepHook(last_step=30)
    seen = []
    with tf.train.MonitoredTrainingSession(
        is_chief=TASK[1] == 0, hooks=[sync, stop]
    ) as session:
        while not session.should_stop():
            session.run(train)
            if not session.should_stop():
                seen.append([int(session.run(step)), float(session.run(w)[0])])
    say(seen=seen)


def stuck():
    """Dequeues from a queue that nobody fills."""
    graph()
    with tf.device("/job:ps/task:0"):
        queue = tf.FIFOQueue(1, [tf.int32], shapes=[[]], shared_name="empty")
    take = queue.dequeue()
    with tf.train.MonitoredTrainingSession() as session:
        session.run(take)


def fails():
    _, _, train = graph()
    with tf.train.MonitoredTrainingSession() as session:
        session.run(train)
        if TASK[1] == 1:
            raise ValueError("boom")
        while True:
            session.run(train)


globals()[NAME]()

"""Tests of how a run ends: exit code, first failure, and consistent reports of it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.kit.cluster import Cluster, plain
from tests.kit.oracle import assert_nothing_left

CHIEF_AND_WORKERS = """
backend: local
tasks: {chief: 1, worker: 2}
runtime: {strategy: none}
"""

EAGER = """
import tensorflow as tf
print("sum", float(tf.reduce_sum(tf.range(4))), flush=True)
"""
SESSION = """
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
step = tf.train.GradientDescentOptimizer(0.5).minimize(weight)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(step)
    print("sum", session.run(weight), flush=True)
"""


def test_success_is_0(cluster: Cluster) -> None:
    running = cluster.bash("echo hello from $TFCLUSTER_TASK", count=2)
    assert running.end() == 0
    assert sorted(running.out.splitlines()) == [
        "worker:0 | hello from worker:0",
        "worker:1 | hello from worker:1",
    ]
    report = running.report()
    assert report["state"] == "succeeded"
    assert report["first_failure"] is None
    assert_nothing_left(running)


def test_the_code_of_a_task_is_passed_on_and_the_task_is_named_everywhere(
    cluster: Cluster,
) -> None:
    running = cluster.bash(
        "[ $TFCLUSTER_TASK = worker:1 ] || exec sleep 60; echo bad; exit 33", count=2
    )
    assert running.end() == 33
    log = str(running.log("worker:1"))
    assert "first failure: worker:1 on localhost: exited with code 33" in running.err
    assert "  | bad\n" in running.err
    assert f"  log: {log}\n" in running.err
    expected = {
        "task": "worker:1",
        "host": "localhost",
        "exit_code": 33,
        "signal": None,
        "cause": "exited with code 33",
        "log_tail": ["bad"],
    }
    first = running.status()["first_failure"]
    assert expected.items() <= first.items()
    assert first["log"] == log
    assert_nothing_left(running)


def test_status_has_the_shape_of_the_contract(cluster: Cluster) -> None:
    running = cluster.bash("exit 33")
    assert running.end() == 33
    status = running.status()
    assert list(status)[:10] == [
        "schema",
        "run",
        "name",
        "backend",
        "state",
        "exit_code",
        "started",
        "ended",
        "first_failure",
        "tasks",
    ]
    (task,) = status["tasks"]
    assert list(task)[:11] == [
        "task",
        "host",
        "address",
        "state",
        "pid",
        "attempt",
        "exit_code",
        "signal",
        "step",
        "steps_per_s",
        "log",
    ]
    host, _, port = task["address"].rpartition(":")
    assert host == "127.0.0.1"
    assert port.isdecimal()
    assert (status["exit_code"], task["exit_code"]) == (33, 33)
    assert status["started"] <= status["ended"]
    assert_nothing_left(running)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_signal_is_named(cluster: Cluster, name: str) -> None:
    number = getattr(signal, name).value
    running = cluster.bash(f"ulimit -c 0; echo up; kill -{number} $$; sleep 60")
    assert running.end() == 1
    first = running.report()["first_failure"]
    assert (first["exit_code"], first["signal"]) == (None, name)
    assert name in first["cause"]
    assert name in running.err
    assert_nothing_left(running)


def test_an_uncaught_exception_is_the_cause(cluster: Cluster) -> None:
    running = cluster.python("import nowhere_to_be_found")
    assert running.end() == 1
    cause = "ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert running.report()["first_failure"]["cause"] == cause
    assert f"first failure: worker:0 on localhost: {cause}" in running.err
    assert_nothing_left(running)


def test_an_address_in_use_is_the_cause(cluster: Cluster) -> None:
    code = (
        "import socket; a = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_server(a.getsockname())"
    )
    running = cluster.python(code)
    assert running.end() == 1
    assert "ddress already in use" in running.report()["first_failure"]["cause"]
    assert_nothing_left(running)


def test_a_command_that_is_not_there_is_4_and_starts_nothing(cluster: Cluster) -> None:
    running = cluster.start(*plain(count=2), "--", "./no-such-program")
    assert running.end() == 4
    assert "no-such-program" in running.err
    assert cluster.run_ids() == []


def test_a_program_that_cannot_be_executed_is_4(cluster: Cluster) -> None:
    program = cluster.folder / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    running = cluster.start(*plain(count=2), "--", str(program))
    assert running.end() == 4
    first = running.report()["first_failure"]
    assert first["task"] == "worker:0"
    assert str(program) in first["cause"]
    assert str(program) in running.err
    assert_nothing_left(running)


def test_of_several_failures_the_first_is_to_blame(cluster: Cluster) -> None:
    script = "sleep 0.$TFCLUSTER_RANK; echo; exit $((10 + TFCLUSTER_RANK))"
    running = cluster.bash(script, count=4)
    assert running.end() == 1
    report = running.report()
    assert report["first_failure"]["task"] == "worker:0"
    assert report["first_failure"]["exit_code"] == 10
    assert "<- first failure" in running.err
    assert_nothing_left(running)


PEERS = """
import os, socket, sys, time
path = os.environ['MEETING'] + os.environ['TFCLUSTER_ATTEMPT']
if os.environ['TFCLUSTER_TASK'].startswith('chief'):
    server = socket.create_server(('127.0.0.1', 0))
    with open(path + '.new', 'w') as file:
        file.write(str(server.getsockname()[1]))
    os.rename(path + '.new', path)
    peers = [server.accept()[0] for _ in range(2)]
    if 'LOADER' in os.environ and not os.fork():
        # Like a data loader, it holds the output, and not the connections.
        for peer in peers:
            peer.close()
        time.sleep(600)
    print('all here', flush=True)
    peers[0].recv(1)
else:
    while not os.path.exists(path):
        time.sleep(0.01)
    peer = socket.create_connection(('127.0.0.1', int(open(path).read())))
    if not peer.recv(1):
        sys.exit('my peer is gone')
"""


@pytest.mark.parametrize(
    "extra",
    [
        *("A: b", "LOADER: x"),
        # Which end is reported first is a matter of chance.
        *(pytest.param(e, marks=pytest.mark.slow) for e in ["A: b", "LOADER: x"] * 2),
    ],
)
def test_a_killed_chief_is_to_blame_and_not_its_peers(
    cluster: Cluster, extra: str
) -> None:
    program = cluster.folder / "peers.py"
    program.write_text(PEERS)
    env = f"{{MEETING: {cluster.folder}/port, {extra}}}"
    config = cluster.file(
        f"{CHIEF_AND_WORKERS}command: python -S {program}\nenv: {env}\n"
    )
    running = cluster.start(config)
    running.wait_for_text("all here", "chief:0")
    pid = running.wait_for("task", task="chief:0", state="running")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert running.end() == 1
    report = running.report()
    assert report["first_failure"]["task"] == "chief:0"
    assert report["first_failure"]["signal"] == "SIGKILL"
    blamed = {failure["task"] for failure in report["secondary_failures"]}
    assert blamed <= {"worker:0", "worker:1"}
    assert_nothing_left(running)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("program", "result", "warning"),
    [
        pytest.param(
            EAGER, "sum 6.0", "nothing of this program was divided", id="eager"
        ),
        pytest.param(
            SESSION,
            "sum 0.5",
            "this graph of TensorFlow 1 is not distributed",
            id="session",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_program_that_is_computed_whole_succeeds(
    cluster: Cluster, program: str, result: str, warning: str
) -> None:
    (cluster.folder / "train.py").write_text(program)
    running = cluster.start("-n", "2", "--", sys.executable, "train.py")
    assert running.end() == 0, running.err
    for rank in range(2):
        assert result in running.text(f"worker:{rank}").splitlines()
    assert running.err.count(warning) == 1

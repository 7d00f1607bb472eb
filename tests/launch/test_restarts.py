"""Tests of restarts: which tasks restart, how often, and on which ports."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.kit.cluster import Cluster, plain
from tests.kit.oracle import assert_nothing_left


def test_the_whole_group_starts_again_until_it_succeeds(cluster: Cluster) -> None:
    script = (
        "echo attempt $TFCLUSTER_ATTEMPT; [ $TFCLUSTER_ATTEMPT = 2 ] && exit 0; "
        "[ $TFCLUSTER_RANK = 0 ] && exit 33; exec sleep 60"
    )
    running = cluster.bash(script, "--set", "restart.max=2", count=2)
    assert running.end() == 0
    report = running.report()
    assert report["first_failure"] is None
    assert [(t["state"], t["attempt"]) for t in report["tasks"]] == [
        ("succeeded", 2),
        ("succeeded", 2),
    ]
    for task in ("worker:0", "worker:1"):
        first, *rest = running.text(task).splitlines()
        assert first == "attempt 0"
        assert [line.split(",")[0] for line in rest] == [
            "---- attempt 1",
            "attempt 1",
            "---- attempt 2",
            "attempt 2",
        ]
    assert "restarting all tasks (restart 2 of 2)" in running.err
    assert_nothing_left(running)


def test_a_restart_waits_for_its_backoff(cluster: Cluster) -> None:
    """Nothing runs meanwhile, and Ctrl-C ends the wait."""
    options = ("--set", "restart.max=2", "--set", "restart.backoff=5m")
    running = cluster.bash("exit 33", *options)
    running.wait_for_err("restarting all tasks in 5m (restart 1 of 2)")
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert_nothing_left(running)


LEAVES_A_DAEMON = """
import os, signal, sys, time
attempt = os.environ['TFCLUSTER_ATTEMPT']
folder = os.environ['FOLDER']
if attempt == '1':
    pid = open(folder + '/pid').read()
    print('daemon' if os.path.exists('/proc/' + pid) else 'alone')
    sys.exit(0)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    if os.fork() == 0:
        with open(folder + '/new', 'w') as file:
            file.write(str(os.getpid()))
        os.rename(folder + '/new', folder + '/pid')
        while True:
            time.sleep(1)
    os._exit(0)
while not os.path.exists(folder + '/pid'):
    time.sleep(0.01)
sys.exit(33)
"""


def test_an_attempt_begins_when_nothing_of_the_last_one_is_left(
    cluster: Cluster,
) -> None:
    options = ("--set", "restart.max=1", "--set", f"env.FOLDER={cluster.folder}")
    running = cluster.python(LEAVES_A_DAEMON, *options)
    assert running.end() == 0, running.err
    assert running.text("worker:0").splitlines()[-1] == "alone"
    assert_nothing_left(running)


def test_giving_up_blames_the_last_failure(cluster: Cluster) -> None:
    script = "exit $((40 + TFCLUSTER_ATTEMPT))"
    running = cluster.bash(script, "--set", "restart.max=2")
    assert running.end() == 42
    assert "giving up after 2 restarts" in running.err
    report = running.report()
    assert report["first_failure"]["exit_code"] == 42
    assert report["tasks"][0]["attempt"] == 2
    assert_nothing_left(running)


def test_only_the_failed_task_starts_again_where_asked(cluster: Cluster) -> None:
    script = (
        "echo attempt $TFCLUSTER_ATTEMPT; "
        'if [ $TFCLUSTER_RANK = 0 ]; then until [ -e "$MEETING" ]; do sleep 0.02; done;'
        " exit 0; fi;"
        '[ $TFCLUSTER_ATTEMPT = 1 ] || exit 33; touch "$MEETING"'
    )
    running = cluster.bash(
        script,
        *("--set", "restart.max=1", "--set", "restart.scope=task"),
        *("--set", f"env.MEETING={cluster.folder}/meeting"),
        count=2,
    )
    assert running.end() == 0
    assert [t["attempt"] for t in running.report()["tasks"]] == [0, 1]
    assert running.text("worker:0") == "attempt 0\n"
    assert_nothing_left(running)


LISTEN = """
import json, os, socket, sys
config = json.loads(os.environ['TF_CONFIG'])
host, port = config['cluster']['worker'][0].split(':')
with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(('0.0.0.0', int(port)))
    server.listen()
    client = socket.create_connection((host, int(port)))
    peer, _ = server.accept()
    peer.close()  # our side closes first and leaves a connection in TIME_WAIT
    client.recv(1)
    print('port', port, flush=True)
sys.exit(0 if os.environ['TFCLUSTER_ATTEMPT'] == '20' else 3)
"""


@pytest.mark.slow
def test_a_port_serves_twenty_attempts(cluster: Cluster) -> None:
    running = cluster.python(LISTEN, "--set", "restart.max=20")
    assert running.end(40) == 0
    said = [s for s in running.text("worker:0").splitlines() if s.startswith("port")]
    assert len(said) == 21
    assert len(set(said)) == 1
    assert_nothing_left(running)


NEEDS_A_FRESH_INTERPRETER = """
import os, sys
print('begins', flush=True)
os.environ['-OMP_NUM_THREADS'[1:]] = '1'
import numpy  # as tensorflow does
sys.exit(3 if os.environ['TFCLUSTER_ATTEMPT'] == '0' else 0)
"""


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_task_that_needs_a_fresh_interpreter_gets_it_from_then_on(
    cluster: Cluster,
) -> None:
    options = ("--set", "restart.max=1", "--set", "runtime.warm_start=true")
    command = (sys.executable, "-c", NEEDS_A_FRESH_INTERPRETER)
    running = cluster.start(*plain(*options, count=2), "--", *command)
    assert running.end() == 0, running.err
    for task in ("worker:0", "worker:1"):
        first, _, second = running.text(task).partition("---- attempt 1")
        # It began warm, and then cold.
        assert (first.count("begins"), second.count("begins")) == (2, 1)
    assert running.err.count("the program sets OMP_NUM_THREADS before it imports") == 1

"""Tests of stopping tasks: TERM, grace, KILL, and the processes that tasks started."""

from __future__ import annotations

import signal

from tests.kit import machine
from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left
from tests.kit.time_limits import allow_s

# Rank 0 fails when the file exists; the other ranks work until they are stopped.
FAIL_OR_WORK = """
import os, signal, sys, time
def say(*words):
    print(*words, flush=True)
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
if os.environ['TFCLUSTER_RANK'] == '0':
    wait_for(os.environ['MEETING'])
    sys.exit(33)
"""
OBEY = """
def on_term(number, frame):
    say('TERM')
    time.sleep(0.3)
    say('saved')
    sys.exit(0)
"""
IGNORE = """
def on_term(number, frame):
    say('no')
"""
WORK = """
signal.signal(signal.SIGTERM, on_term)
say('up')
while True:
    time.sleep(1)
"""


def meeting(cluster: Cluster) -> tuple[str, str]:
    return "--set", f"env.MEETING={cluster.folder}/meeting"


def test_tasks_get_one_sigterm_and_their_grace(cluster: Cluster) -> None:
    running = cluster.python(FAIL_OR_WORK + OBEY + WORK, *meeting(cluster), count=3)
    running.wait_for_text("up", "worker:1", "worker:2")
    (cluster.folder / "meeting").touch()
    assert running.end() == 33
    for task in ("worker:1", "worker:2"):
        assert running.text(task) == "up\nTERM\nsaved\n"
    report = running.report()
    assert [t["state"] for t in report["tasks"]] == ["failed", "stopped", "stopped"]
    assert report["secondary_failures"] == []
    assert_nothing_left(running)


def test_a_task_that_ignores_term_is_killed_after_the_grace(cluster: Cluster) -> None:
    options = (*meeting(cluster), "--set", "grace=1s")
    running = cluster.python(FAIL_OR_WORK + IGNORE + WORK, *options, count=2)
    running.wait_for_text("up", "worker:1")
    (cluster.folder / "meeting").touch()
    assert running.end() == 33
    stopping = running.found("task", task="worker:1", state="stopping")[0]["t"]
    stopped = running.found("task", task="worker:1", state="stopped")[0]
    assert stopped["signal"] == "SIGKILL"
    assert 0.9 < stopped["t"] - stopping < allow_s(3)
    assert running.text("worker:1") == "up\nno\n"
    assert_nothing_left(running)


FAMILY = """
import os, signal, sys, time
def child(name, *, sessions, ignore):
    if os.fork():
        return
    for _ in range(sessions):
        os.setsid()
        if os.fork():
            os._exit(0)
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name == 'nameless':
        os.execve('/bin/sleep', ['sleep', '600'], {})
    with open(os.environ['MEETING'] + name, 'w') as file:
        file.write(str(os.getpid()))
    time.sleep(600)
child('plain', sessions=0, ignore=False)
child('deaf', sessions=0, ignore=True)
child('daemon', sessions=1, ignore=False)
child('deaf-daemon', sessions=2, ignore=True)
child('nameless', sessions=2, ignore=False)
names = 'plain', 'deaf', 'daemon', 'deaf-daemon'
while not all(os.path.exists(os.environ['MEETING'] + name) for name in names):
    time.sleep(0.01)
print('family complete', flush=True)
"""


def test_what_a_task_leaves_behind_is_swept(cluster: Cluster) -> None:
    running = cluster.python(FAMILY, *meeting(cluster))
    code, seconds = running.end_timed()
    assert code == 0
    assert seconds < allow_s(5)
    assert "swept 5 leftover processes" in running.err
    assert running.report()["swept"] == 5
    assert_nothing_left(running)


def test_the_whole_family_of_a_task_is_stopped(cluster: Cluster) -> None:
    code = FAMILY + "time.sleep(600)\n"
    running = cluster.python(code, *meeting(cluster), "--set", "grace=1s")
    running.wait_for_text("family complete", "worker:0")
    running.signal(signal.SIGTERM)
    exit_code, seconds = running.end_timed()
    assert exit_code == 143
    assert seconds < allow_s(5)
    assert_nothing_left(running)


def test_a_grandchild_that_holds_the_output_delays_nothing(cluster: Cluster) -> None:
    running = cluster.bash("(sleep 600 &); echo done")
    code, seconds = running.end_timed()
    assert code == 0
    assert seconds < allow_s(4)
    assert running.text("worker:0") == "done\n"
    assert_nothing_left(running)


def test_a_stopped_task_can_be_stopped(cluster: Cluster) -> None:
    running = cluster.bash("echo up; kill -STOP $$; sleep 600", "--set", "grace=20s")
    running.up()
    running.signal(signal.SIGTERM)
    code, seconds = running.end_timed()
    assert code == 143
    assert seconds < allow_s(5)
    assert_nothing_left(running)


def test_foreign_processes_of_the_same_name_survive(cluster: Cluster) -> None:
    other = Cluster(cluster.folder / "other")
    other.folder.mkdir()
    spared = other.bash("echo up; exec sleep 600", "--name", "same").up()
    running = cluster.bash("sleep 600 & echo done", "--name", "same")
    assert running.end() == 0
    assert_nothing_left(running)
    pid = spared.wait_for("task", state="running")["pid"]
    assert machine.is_alive(pid)
    spared.signal(signal.SIGTERM)
    assert spared.end() == 143
    assert_nothing_left(spared)

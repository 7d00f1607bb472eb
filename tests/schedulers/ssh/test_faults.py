"""Launches over SSH on several hosts with faults: full disks, wrong clocks, changed
keys, no Python, no network, no power.

The order of the tests matters: a host that was switched off has another hardware
address afterwards, which its neighbours learn only after a while.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.cluster import Running
from tests.kit.machine import is_stopped
from tests.kit.oracle import assert_nothing_left, assert_nothing_runs
from tests.kit.waiting import eventually
from tests.rigs.testbed import Host, Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.rigs.testbed.packages import require
from tests.schedulers.ssh.rig_launches import USER, RigCluster, host_processes, launcher

PYTHON3 = ("--set", "python=python3")
QUIET = "echo up; sleep 300"
LEASE_S = 30.0
FAKE_TIME = "faketime/libfaketime.so.1"
HOUR_S = 3600


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=4))


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def cluster(rig: Testbed, numbers: Iterator[int]) -> Iterator[RigCluster]:
    cluster = RigCluster(rig, rig.accounts[USER].home / f"fault-{next(numbers)}")
    yield cluster
    try:
        rig.repair()
        assert_nothing_runs(cluster)
    finally:
        cluster.end()


@pytest.fixture
def home(rig: Testbed) -> Path:
    return rig.accounts[USER].home


def kill(*pids: int) -> None:
    """Kill all at once: none of them may react to the death of another.

    One process alone is not stopped first. ``nsenter`` stops with the launcher, and it
    would stay stopped if it saw the stop before the death.
    """
    numbers = (signal.SIGSTOP, signal.SIGKILL) if len(pids) > 1 else (signal.SIGKILL,)
    for number in numbers:
        for pid in pids:
            os.kill(pid, number)


def wait_gone(cluster: RigCluster, timeout_s: float, *hosts: Host) -> None:
    """Wait until the user has only sshd processes on these hosts (default: all)."""
    number = cluster.rig.accounts[USER].number

    def left() -> list[str]:
        return [
            f"{host.name}: {' '.join(process.argv)[:200]}"
            for host in hosts or cluster.rig.hosts
            for process in host.processes()
            if process.user == number
            and process.pid not in host_processes(host).sessions
        ]

    eventually(lambda: not left(), lambda: str(left()), timeout_s)


# --- before anything starts ----------------------------------------------------------


def refused(cluster: RigCluster, running: Running, code: int) -> str:
    """The messages of a launch that failed without starting a task on any host."""
    assert running.end(60) == code, running.err
    assert not running.found("task", state="starting")
    assert_nothing_left(running)
    return running.err


def test_a_changed_host_key_stops_all(cluster: RigCluster) -> None:
    cluster.rig.host("node2").sshd.change_key()
    said = refused(cluster, cluster.shell(QUIET, "node[1-3]", count=3), 3)
    assert "node2: POSSIBLE ATTACK" in said


def test_no_python_on_one_host(cluster: RigCluster) -> None:
    cluster.rig.host("node3").filesystem.remove_python()
    said = refused(cluster, cluster.shell(QUIET, "node[1-3]", *PYTHON3, count=3), 4)
    assert re.search(r"node3: .*python3 does not exist", said), said


def test_a_full_home_on_one_host(cluster: RigCluster, home: Path) -> None:
    """The agent cannot be unpacked on this host."""
    # Create it as the user: it stays when the disk is unmounted.
    cluster.rig.host("node1").output(("mkdir", "-p", str(home / ".cache")), user=USER)
    one = cluster.rig.host("node1").filesystem
    one.limit(home / ".cache", 64 * 1024)
    one.fill(home / ".cache")
    said = refused(cluster, cluster.shell(QUIET, "node[1-3]", count=3), 4)
    assert "node1" in said
    assert "No space left on device" in said


# --- during the run ------------------------------------------------------------------


def test_a_full_temporary_folder_is_the_programs_own_affair(
    cluster: RigCluster,
) -> None:
    two = cluster.rig.host("node2").filesystem
    two.limit(Path("/var/tmp"), 64 * 1024)
    two.fill(Path("/var/tmp"))
    script = "echo up on $(hostname); echo more > /var/tmp/file || exit 33"
    running = cluster.shell(script, "node[1-2]", count=2)
    assert running.end(60) == 33, running.err
    report = running.report()
    assert report["first_failure"]["host"] == "node2"
    assert report["first_failure"]["exit_code"] == 33
    assert_nothing_left(running)


def test_a_full_disk_of_logs_on_one_host(cluster: RigCluster) -> None:
    """The message names the host, and the output of its tasks is still shown."""
    cluster.state.mkdir(mode=0o700)
    number = cluster.rig.accounts[USER].number
    os.chown(cluster.state, number, number)
    three = cluster.rig.host("node3").filesystem
    three.limit(cluster.state, 64 * 1024)
    three.fill(cluster.state)
    script = "echo said on $(hostname); sleep 1; echo through on $(hostname)"
    running = cluster.shell(script, "node[2-3]", count=2)
    assert running.end(60) == 0, running.err
    assert "worker:1 on node3: cannot write its log" in running.err
    assert "No space left on device" in running.err
    for name in ("node2", "node3"):
        assert f"said on {name}" in running.out
        assert f"through on {name}" in running.out
    assert_nothing_left(running)


def test_a_clock_that_is_wrong_and_jumps(cluster: RigCluster) -> None:
    """The clock is first an hour fast, then an hour slow; no timeout depends on it."""
    require(("clock",))
    (library,) = Path("/usr/lib").glob(f"*/{FAKE_TIME}")
    clock = cluster.folder / "clock"
    clock.write_text("+1h")
    python = cluster.folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f"export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={clock}\n"
        "export FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    script = "echo at $(date +%s); while [ ! -e go ]; do sleep 0.1; done; date +%s"
    description = cluster.file(
        f"backend: ssh\nhosts: [node1, {{host: node2, python: {python}}}]\n"
        "tasks: {worker: 2}\nruntime: {strategy: none}\n"
        f"command: [bash, -c, '{script}']\n"
    )
    began_s = time.time()
    running = cluster.start(description).up("at ", count=2)
    clock.write_text("-1h")
    running.wait_for("state", state="running")
    assert running.status()["state"] == "running"
    (cluster.folder / "go").touch()
    assert running.end(60) == 0, running.err
    ended_s = time.time()
    right, wrong = (_numbers(running.text(f"worker:{i}")) for i in (0, 1))
    assert abs(wrong[0] - right[0] - HOUR_S) < 60
    assert abs(wrong[1] - right[1] + HOUR_S) < 60
    assert re.search(r"warning: clock of node2: \+3[56]\d\d s", running.err), (
        running.err
    )
    times = [event["t"] for event in running.events()]
    assert times == sorted(times)
    assert began_s - 1 < times[0] < times[-1] < ended_s + 1
    assert all(0 < task["seconds"] < 60 for task in running.report()["tasks"])
    assert_nothing_left(running)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdecimal()]


def test_the_guard_is_what_sshd_waits_for(cluster: RigCluster) -> None:
    """The channel ends with the guard; this counts as a lost host, not as a stop."""
    running = cluster.shell(QUIET, "node1", count=1).up()
    for pid in host_processes(cluster.rig.host("node1")).guards:
        kill(pid)
    assert running.end(60) == 5, running.err
    failure = running.report()["first_failure"]
    assert failure["host"] == "node1"
    assert re.search(
        r"the guard process of its agent \(pid \d+\) died, and the connection ended",
        failure["cause"],
    )
    assert failure["cause"] in running.err
    assert_nothing_left(running)


def test_status_and_stop_from_elsewhere(cluster: RigCluster) -> None:
    running = cluster.shell(QUIET, "node[1-2]", count=2).up(count=2)
    for host in ("login", "node1", "node4"):
        said = cluster.command("status", host=host)
        assert said.returncode == 0, said.stderr
        assert running.run in said.stdout
        assert "running" in said.stdout
        logs = cluster.command("logs", "-v", host=host)
        assert logs.stdout.count("up") == 2, logs.stdout
    refused = cluster.command("stop", running.run, host="node4")
    assert refused.returncode == 5
    assert f"the launcher of {running.run} runs on login" in refused.stderr
    assert f"run `tfcluster stop {running.run}` there" in refused.stderr
    stopped = cluster.command("stop", running.run, timeout_s=60)
    assert stopped.returncode == 0, stopped.stderr
    assert running.end(60) == 143
    assert_nothing_left(running)


def test_a_killed_launcher_ends_all_at_once(cluster: RigCluster) -> None:
    """Its connections end with it, so nothing waits for the lease."""
    running = cluster.shell(QUIET, "node[1-4]", count=4).up(count=4)
    (pid,) = launcher(running)
    kill(pid)
    assert running.end() == -signal.SIGKILL
    wait_gone(cluster, LEASE_S / 2)
    for host in ("login", "node3"):
        status = cluster.command("status", running.run, host=host)
        assert "lost" in status.stdout
        assert "the launcher died" in status.stdout
    assert_nothing_left(running, report=False)


def test_stop_sweeps_from_another_host(cluster: RigCluster) -> None:
    """Launcher, agents and guards were killed; only the tasks are left."""
    running = cluster.shell(QUIET, "node[1-2]", count=2).up(count=2)
    found = [host_processes(cluster.rig.host(name)) for name in ("node1", "node2")]
    (first,) = launcher(running)
    way_in = running.process.pid
    os.kill(first, signal.SIGSTOP)
    # nsenter stops some time after the launcher; wait, or it may stop after SIGCONT.
    eventually(lambda: is_stopped(way_in), lambda: f"{way_in} runs", 20.0)
    kill(first, *(pid for each in found for pid in (*each.guards, *each.agents)))
    os.kill(way_in, signal.SIGCONT)
    running.end()
    hosts = [cluster.rig.host(name) for name in ("node1", "node2")]
    # A killed agent is the parent of its task until it has ended.
    eventually(
        lambda: not any(host_processes(host).agents for host in hosts),
        "the agents are still there",
    )
    assert all(host_processes(host).others for host in hosts)
    done = cluster.command("stop", running.run, host="node4", timeout_s=60)
    assert done.returncode == 0, done.stderr
    for name in ("node1", "node2"):
        assert f"{name}: " in done.stderr
    assert_nothing_left(running, report=False)


# --- the network ---------------------------------------------------------------------


def cut_for(running: Running, host: Host, seconds: float) -> None:
    """Cut the cable for so long. The wait is not for a condition: it is the fault."""
    host.cable.cut()
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(seconds)
    host.cable.heal()


def test_a_partition_of_10_s_loses_no_line(cluster: RigCluster) -> None:
    script = "echo up; for ((i = 0; i < 300; i++)); do echo n$i; sleep 0.05; done"
    running = cluster.shell(script, "node[1-2]", count=2).up(count=2)
    cut_for(running, cluster.rig.host("node2"), 10.0)
    assert running.end(60) == 0, running.err
    wanted = [f"n{number}" for number in range(300)]
    for task in ("worker:0", "worker:1"):
        assert [w for w in running.text(task).split() if w[0] == "n"] == wanted
        lines = [line for line in running.out.splitlines() if task in line]
        shown = [line.split()[-1] for line in lines]
        assert [word for word in shown if word[0] == "n"] == wanted
    assert_nothing_left(running)


def test_a_partition_that_lasts_loses_the_host(cluster: RigCluster) -> None:
    """Both sides end by themselves, and nothing is left once the network is back."""
    running = cluster.shell(QUIET, "node[1-3]", "--set", "grace=1s", count=3).up(
        count=3
    )
    two = cluster.rig.host("node2")
    two.cable.cut()
    assert running.end(60) == 5, running.err
    assert "node2 silent for 15 s" in running.err
    others = (cluster.rig.host(name) for name in ("login", "node1", "node3"))
    wait_gone(cluster, 15.0, *others)
    assert host_processes(two).agents  # its lease still runs
    eventually(
        lambda: not host_processes(two).others and not host_processes(two).tasks,
        lambda: str(host_processes(two)),
        LEASE_S + 15,
    )
    two.cable.heal()
    assert_nothing_left(running)


def test_a_frozen_host_is_lost_though_its_kernel_answers(cluster: RigCluster) -> None:
    """The kernel accepts connections for sshd, which does not answer."""
    running = cluster.shell(QUIET, "node[1-2]", "--set", "grace=1s", count=2).up(
        count=2
    )
    two = cluster.rig.host("node2")
    two.freeze()
    assert running.end(60) == 5, running.err
    assert "node2 silent for 15 s" in running.err
    two.thaw()
    wait_gone(cluster, 15.0)
    assert_nothing_left(running)


@pytest.mark.chaos  # because it takes a minute
@pytest.mark.timeout(240)
def test_without_a_silent_host_the_others_begin_again(cluster: RigCluster) -> None:
    """They restart only after the silent agent's lease: two runs must not overlap."""
    script = 'echo up; [ "$TFCLUSTER_SIZE" = 2 ] || exec sleep 300'
    least = ("--set", "tasks.worker.min=2", "--set", "restart.max=1")
    collective = ("runtime.strategy=collective", "runtime.require_exchange=false")
    chosen = [word for each in collective for word in ("--set", each)]
    options = ("--set", "grace=1s", *chosen, *least)
    running = cluster.shell(script, "node[1-3]", *options, count=3).up(count=3)
    began = time.monotonic()
    cluster.rig.host("node2").cable.cut()
    assert running.end(120) == 0, running.err
    assert time.monotonic() - began > LEASE_S
    assert "node2 silent for 15 s" in running.err
    two = cluster.rig.host("node2")
    assert not host_processes(two).tasks, (
        "the host had let go before the others began again"
    )
    two.cable.heal()
    assert_nothing_left(running)


# --- power ---------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_launcher_without_power_ends_all_within_the_lease(
    cluster: RigCluster,
) -> None:
    """The agents get no end of file, only silence."""
    running = cluster.shell(QUIET, "node[1-3]", "--set", "grace=1s", count=3).up(
        count=3
    )
    began = time.monotonic()
    cluster.rig.login.power_off()
    running.end()
    wait_gone(cluster, LEASE_S + 30, *cluster.rig.nodes)
    assert time.monotonic() - began > LEASE_S / 2
    for node in cluster.rig.nodes:
        for pid in host_processes(node).sessions:
            kill(pid)  # sshd itself would wait for hours
    status = cluster.command("status", running.run, host="node1")
    assert "lost" in status.stdout, status


def test_hosts_without_power_are_named_together(cluster: RigCluster) -> None:
    for name in ("node2", "node3"):
        cluster.rig.host(name).power_off()
    running = cluster.shell(QUIET, "node[1-4]", count=4)
    said = refused(cluster, running, 3)
    for name in ("node2", "node3"):
        assert re.search(f"{name}: .*no (answer|route)", said), said
    assert "node1: " not in said
    assert "node4: " not in said

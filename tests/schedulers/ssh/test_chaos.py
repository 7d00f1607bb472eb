"""Random processes are killed at random times; nothing may be left on any host.

``tests.launch.chaos`` reads the seed and the number of trials from the environment.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import pytest

from tests.launch.chaos import PROGRAM, seeds, strikes
from tests.launch.oracle import assert_nothing_left, assert_nothing_runs
from tests.schedulers.ssh.rig_launches import (
    USER,
    HostProcesses,
    RigCluster,
    host_processes,
    launcher,
    over_ssh,
)
from tests.testbed import Options, Testbed
from tests.testbed.fixtures import Factory

TRIALS = 4
LONGEST_S = 4.5
"""The longest time until a kill; connecting to three hosts takes a second of it."""
NODES = 3

# Stubs can be killed like the real packages, and import at once.
STUB = ("tensorflow", "keras")

Found = Callable[[HostProcesses], list[int]]

ON_HOSTS: Mapping[str, Found] = {
    "task": lambda host_processes: host_processes.tasks[:1],
    "child": lambda host_processes: host_processes.others[:1],
    "children": lambda host_processes: host_processes.others,
    "agent": lambda host_processes: host_processes.agents,
    "guard": lambda host_processes: host_processes.guards,
    "guard, agent": lambda host_processes: (
        host_processes.guards + host_processes.agents
    ),
    "warm": lambda host_processes: host_processes.warm,
    "session": lambda host_processes: host_processes.sessions[:1],
    "sessions": lambda host_processes: host_processes.sessions,
}
LAUNCHER = "launcher"

FITS: Mapping[str, set[int]] = {
    LAUNCHER: {-signal.SIGKILL},
    "task": {1},
    "child": set(),
    "children": set(),
    "guard": {4, 5},
    "agent": {4, 5},
    "warm": {1, 4},
    "session": {3, 4, 5},
    "sessions": {3, 4, 5},
}
"""Allowed exit codes. 0 is always allowed: a killed process may have been done."""


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=NODES))


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return count()


@pytest.fixture
def cluster(rig: Testbed, numbers: Iterator[int]) -> Iterator[RigCluster]:
    cluster = RigCluster(rig, rig.accounts[USER].home / f"trial-{next(numbers)}")
    yield cluster
    try:
        assert_nothing_runs(cluster)
    finally:
        # Processes of a failed test must not disturb the others.
        cluster.end()


def words(cluster: RigCluster, *, warm: bool) -> list[str]:
    """The words of a launch with a task on each of the hosts."""
    hosts = f"node[1-{NODES}]"
    options = ("--set", "grace=1s")
    if not warm:
        return [*over_ssh(hosts, *options, count=NODES), "--", "python3", "-c", PROGRAM]
    for name in STUB:
        folder = cluster.folder / "stub" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (cluster.folder / "train.py").write_text(f"import tensorflow\n{PROGRAM}")
    env = ("--set", f"env.PYTHONPATH={cluster.folder / 'stub'}")
    given = over_ssh(hosts, *options, *env, count=NODES)
    return [*given, "--", "python", "train.py"]


@pytest.mark.chaos
@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", seeds(TRIALS))
def test_nothing_survives_on_any_host(cluster: RigCluster, seed: int) -> None:
    rng = random.Random(seed)
    running = cluster.start(*words(cluster, warm=rng.choice([False, True])))

    def pick() -> tuple[str, list[int]]:
        """Choose from the processes that exist now."""
        host = rng.choice(cluster.rig.nodes)
        there = host_processes(host)
        found = {f"{kind} on {host.name}": of(there) for kind, of in ON_HOSTS.items()}
        found[LAUNCHER] = launcher(running)
        choices = [what for what, pids in found.items() if pids] or [LAUNCHER]
        what = rng.choice(choices)
        return what, found[what]

    hit = list(strikes(rng, LONGEST_S, pick))
    code = running.end(60)
    told = f"seed {seed}: {', '.join(map(str, hit))}; exit code {code}; {running.err}"
    killed = {each.what.partition(" on ")[0] for each in hit if each.pids}
    kinds = {kind for names in killed for kind in names.split(", ")}
    assert code in {0}.union(*(FITS[kind] for kind in kinds)), told
    if not cluster.run_ids():
        return  # killed before there was a run
    running.adopt(cluster.run_ids()[0])
    try:
        assert_nothing_left(running, report=code >= 0)
    except AssertionError as error:
        raise AssertionError(f"{error}; {told}") from error

"""Launches in a Slurm job with more hosts than get a job step each."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.schedulers.sge.site import USER
from tests.schedulers.slurm.test_rig import SlurmSite, site_for
from tfcluster.schedulers.slurm.starter import MOST_ALONE

NODES = MOST_ALONE + 1

pytestmark = pytest.mark.testbed


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=NODES, slurm=True))


@pytest.fixture
def site(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[SlurmSite]:
    with site_for(rig, request.node.name) as site:
        yield site


def launch(site: SlurmSite) -> None:
    """Launch one task on each host, and wait until all of them run."""
    tasks = {"chief": 1, "worker": NODES - 1}
    site.start("launch", site.launch_config(tasks, nodes=NODES))
    said = site.wait_for_tasks(NODES)
    hosts = sorted(each["host"] for each in said.values())
    assert hosts == sorted(f"node{number + 1}" for number in range(NODES))


def steps(site: SlurmSite) -> list[str]:
    """The names of the job's steps, less those that every job has."""
    said = site.slurm("squeue", "--steps", "--noheader", "--format=%j %i")
    found = [line.split() for line in said.splitlines()]
    return [name for name, number in found if number.rpartition(".")[2].isdigit()]


def test_one_step_starts_the_agents_of_many_hosts(site: SlurmSite) -> None:
    launch(site)
    assert steps(site) == ["tfcluster"]
    site.write(site.go, "")
    code, output = site.finish(site.started[-1])
    assert code == 0, output
    site.nothing_is_left()


def test_why_one_host_of_many_has_no_agent_is_said(site: SlurmSite) -> None:
    bad = site.rig.nodes[-1]
    cache = site.rig.accounts[USER].home / ".cache" / "tfcluster"
    site.rig.login.output(("mkdir", "-p", str(cache)), user=USER)
    # Only on this host, whose mounts are its own.
    bad.output(("mount", "-t", "tmpfs", "-o", "mode=0777", "none", str(cache)))
    try:
        tasks = {"chief": 1, "worker": NODES - 1}
        follower = site.start("launch", site.launch_config(tasks, nodes=NODES))
        code, output = site.finish(follower)
    finally:
        bad.output(("umount", str(cache)))
    assert code == 4, output
    assert f"{bad.name}" in output
    assert "other users can write to" in output or "another user" in output, output
    site.nothing_is_left()


def test_the_loss_of_one_host_is_noticed_and_leaves_nothing(site: SlurmSite) -> None:
    launch(site)
    lost = site.rig.nodes[-1]
    (agent,) = (
        process.pid for process in lost.processes() if "agent" in process.argv[0]
    )
    os.kill(agent, signal.SIGKILL)
    code, output = site.finish(site.started[-1])
    assert code == 5, output
    assert re.search(rf"{lost.name}\b.*lost", output), output
    site.nothing_is_left()

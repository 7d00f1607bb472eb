"""Jobs whose scheduler stops answering, or loses a host, while they wait or run.

The order of the tests matters: Grid Engine daemons whose connections were refused take
minutes to come back.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.rigs.testbed import Host, Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.schedulers.sge.site import USER, Site, wait_for
from tests.schedulers.slurm.test_rig import SlurmSite

BACKENDS = ("slurm", "sge")


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    """A separate rig, because hosts come back with other hardware addresses."""
    return testbed_factory(Options(nodes=4, slurm=True, sge=True))


@pytest.fixture
def site(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site for the backend that the test's parameter ``backend`` names."""
    kind = SlurmSite if request.node.callspec.params["backend"] == "slurm" else Site
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    folder = rig.accounts[USER].home / name
    rig.login.output(("mkdir", "-m", "700", "-p", str(folder)), user=USER)
    site = kind(rig, folder, sys.executable)
    try:
        yield site
    finally:
        for process in site.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
        rig.repair()
        if jobs := site.jobs():
            rig.login.run(("scancel", *jobs), user=USER)
            rig.login.run(("qdel", *jobs), user=USER)
            wait_for(lambda: not site.jobs(), "end of all jobs", 90.0)


def config(site: Site, nodes: int = 4) -> str:
    """Write a configuration with one task on each of ``nodes`` hosts."""
    tasks = {"chief": 1, "worker": nodes - 1}
    if isinstance(site, SlurmSite):
        return site.launch_config(tasks, nodes=nodes)
    return str(site.config(tasks, sge={"parallel_environment": "tf"}))


def launchers_host(site: Site) -> Host:
    (host,) = (
        host
        for host in site.rig.nodes
        for process in host.processes()
        if "--submitted" in process.argv
    )
    return host


def in_heard(site: Site, words: str, timeout_s: float = 60.0) -> None:
    wait_for(lambda: words in site.heard.read_text(), words, timeout_s)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_ends_well_while_its_scheduler_is_frozen(
    site: Site, backend: str
) -> None:
    follower = site.start("launch", config(site))
    site.wait_for_tasks(4)
    head = site.rig.host("head")
    head.freeze()
    site.write(site.go, "")
    code, said = site.finish(follower)
    head.thaw()
    assert code == 0, said
    assert site.status()["state"] == "succeeded"
    site.nothing_is_left()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_is_heard_while_the_scheduler_is_frozen(
    site: Site, backend: str
) -> None:
    follower = site.start("launch", config(site))
    site.wait_for_tasks(4)
    head = site.rig.host("head")
    head.freeze()
    for word in ("cancelling job", "killing job"):
        follower.send_signal(signal.SIGINT)
        in_heard(site, word, 20.0)
    follower.send_signal(signal.SIGINT)
    code, said = site.finish(follower, 20.0)
    head.thaw()
    assert code == 130, said
    site.run("stop")
    site.nothing_is_left()
    assert site.status()["state"] == "stopped"


@pytest.mark.parametrize("backend", ["slurm"])
def test_a_job_that_begins_again_on_other_hosts_is_followed(
    site: SlurmSite, backend: str
) -> None:
    """Slurm requeues a job that has lost a host."""
    follower = site.start("launch", config(site, nodes=3))
    site.wait_for_tasks(3)
    (job,) = site.jobs()
    lost = launchers_host(site)
    lost.power_off()
    in_heard(site, "lost: ")
    # slurmctld would find this out by itself later.
    down = ("scontrol", "update", f"nodename={lost.name}", "state=down", "reason=x")
    site.rig.host("head").output(down)
    in_heard(site, "it will start again")
    first = site.status()
    assert (first["state"], first["exit_code"]) == ("lost", 5)
    site.slurm("scontrol", "update", f"jobid={job}", "starttime=now+2")
    states = ["running", "lost"]
    wait_for(lambda: [run["state"] for run in site.runs()] == states, "a second run")
    site.write(site.go, "")
    code, said = site.finish(follower)
    assert code == 0, said
    # The outcome of the first run is known only now.
    assert [run["exit_code"] for run in site.runs()] == [0, 75]
    assert lost.name not in {task["host"] for task in site.status()["tasks"]}
    site.nothing_is_left()


@pytest.mark.parametrize("backend", ["sge"])
def test_a_job_whose_host_is_lost_is_not_left_in_silence(
    site: Site, backend: str
) -> None:
    """Grid Engine waits for the host and never gives up the job."""
    follower = site.start("launch", config(site))
    site.wait_for_tasks(4)
    (job,) = site.jobs()
    launchers_host(site).power_off()
    code, said = site.finish(follower)
    assert code == 5, said
    assert "lost: " in said
    assert f"is still running according to Grid Engine; `qdel {job}` ends it" in said
    wait_for(lambda: not site.leftovers(), "end of all processes")


@pytest.mark.parametrize("backend", ["sge"])
def test_a_host_without_power_ends_the_run(site: Site, backend: str) -> None:
    follower = site.start("launch", config(site))
    site.wait_for_tasks(4)
    kept = launchers_host(site)
    lost = next(host for host in site.rig.nodes if host is not kept)
    lost.power_off()
    code, said = site.finish(follower)
    assert code == 5, said
    assert re.search(rf"first failure: .*{lost.name}\S* silent for 15 s", said), said
    ends = [task["state"] for task in site.status()["tasks"]]
    assert sorted(ends) == ["lost", "stopped", "stopped", "stopped"]
    wait_for(lambda: not site.leftovers(), "end of all processes")


@pytest.mark.parametrize("backend", ["sge"])
def test_no_answer_is_not_taken_for_the_end_of_a_job(site: Site, backend: str) -> None:
    """The job waits in the queue, so that only the scheduler knows its state."""
    section = {"parallel_environment": "tf", "options": ["-h"]}
    config = site.config({"chief": 1, "worker": 3}, sge=section)
    follower = site.start("launch", str(config))
    in_heard(site, "held")
    (job,) = site.jobs()
    head = site.rig.host("head")
    head.firewall.reject("6444")
    in_heard(site, "the scheduler does not answer")
    assert follower.poll() is None
    head.firewall.open()
    in_heard(site, "the scheduler answers again")
    assert site.jobs() == [job]
    follower.send_signal(signal.SIGINT)
    code, said = site.finish(follower)
    assert code == 130, said
    site.nothing_is_left()

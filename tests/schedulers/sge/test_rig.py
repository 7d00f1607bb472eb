"""Launches under a real Grid Engine, from the login host and within jobs."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.testbed import Testbed
from tests.rigs.testbed.layout import REPOSITORY
from tests.schedulers.sge.site import USER, Site, site_on, wait_for

FOUR = {"chief": 1, "worker": 3}


@pytest.fixture
def site(testbed: Testbed, request: pytest.FixtureRequest) -> Iterator[Site]:
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    home = testbed.accounts[USER].home
    yield from site_on(testbed, Path(home, name), sys.executable)


def section(environment: str = "tf", **keys: Any) -> dict[str, Any]:
    return {"parallel_environment": environment, **keys}


@pytest.mark.parametrize(
    ("environment", "hosts"), [("tf", 4), ("tf_2", 2), ("tf_fill", 1)]
)
def test_a_launch_from_the_login_host_submits_and_follows(
    site: Site, environment: str, hosts: int
) -> None:
    config = site.config(FOUR, sge=section(environment))
    follower = site.start("launch", str(config))
    said = site.wait_for_tasks(4)
    used = {each["host"] for each in said.values()}
    assert len(used) <= hosts if environment == "tf" else len(used) == hosts
    clusters = [each["config"]["cluster"] for each in said.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {job: len(where) for job, where in clusters[0].items()} == FOUR
    assert [each["config"]["task"] for each in said.values()] == [
        {"type": "chief", "index": 0},
        *({"type": "worker", "index": index} for index in range(3)),
    ]
    shells = [
        line for line in site.leftovers() if "qrsh" in line and "-inherit" in line
    ]
    assert (
        len([line for line in shells if "sh -c" not in line.split("-inherit")[0]])
        == len(used) - 1
    ), "the host of the launcher needs no qrsh"
    site.write(site.go, "")
    code, output = site.finish(follower)
    assert code == 0, output
    assert "succeeded" in output
    assert site.status()["state"] == "succeeded"
    site.nothing_is_left()


def test_a_launch_that_waits_says_why_and_ends_with_ctrl_c(site: Site) -> None:
    config = site.config(FOUR, sge=section(slots=99))
    follower = site.start("launch", str(config))
    wait_for(lambda: "only offers" in site.reason(), "Grid Engine's word")
    assert " is waiting (qw)" in site.reason()
    wait_for(lambda: "only offers" in site.heard.read_text(), "word of the follower")
    follower.send_signal(signal.SIGINT)
    code, output = site.finish(follower)
    assert code == 130, output
    site.nothing_is_left()
    assert site.status()["state"] == "stopped"


def test_a_job_in_error_state_is_reported_with_its_reason(site: Site) -> None:
    wrong = section(options=["-wd", "/no/such/folder"])
    follower = site.start("launch", str(site.config(FOUR, sge=wrong)))
    wait_for(lambda: "/no/such/folder" in site.reason(), "reason of the error")
    reason = site.reason()
    assert "(Eqw)" in reason
    assert "qmod -cj" in reason
    wait_for(lambda: "/no/such/folder" in site.heard.read_text(), "follower's word")
    (job,) = site.jobs()
    site.sge("qdel", job)
    code, output = site.finish(follower)
    assert code == 4, output
    site.nothing_is_left()


def test_qdel_lets_the_run_stop_in_order(site: Site) -> None:
    follower = site.start("launch", str(site.config(FOUR, sge=section())))
    site.wait_for_tasks(4)
    (job,) = site.jobs()
    site.sge("qdel", job)
    code, output = site.finish(follower)
    assert code == 143, output
    assert site.status()["state"] == "stopped"
    assert {task["state"] for task in site.status()["tasks"]} == {"stopped"}, output
    site.nothing_is_left()


def test_a_rescheduled_job_is_a_run_of_its_own(site: Site) -> None:
    """Uses one host: Grid Engine 8.1.9 never restarts jobs with tasks on several."""
    config = site.config(FOUR, sge=section("tf_fill"))
    follower = site.start("launch", str(config))
    site.wait_for_tasks(4)
    (job,) = site.jobs()
    # Hold the job, so that it cannot restart before the first run was checked.
    site.sge("qhold", job)
    site.rig.host("head").output(("qmod", "-f", "-rj", job))
    wait_for(lambda: site.status()["exit_code"] is not None, "the first run's end")
    first = site.status()
    assert first["exit_code"] == 75, first
    assert {task["state"] for task in first["tasks"]} == {"stopped"}
    log = Path(first["tasks"][0]["log"]).read_bytes()
    wait_for(lambda: not site.leftovers(), "the end of its processes")
    assert site.jobs() == [job]
    site.sge("qrls", job)
    wait_for(
        lambda: [run["state"] for run in site.runs()] == ["running", "stopped"],
        "a second run",
    )
    site.write(site.go, "")
    code, output = site.finish(follower)
    assert code == 0, output
    assert [run["exit_code"] for run in site.runs()] == [0, 75]
    assert Path(first["tasks"][0]["log"]).read_bytes() == log
    site.nothing_is_left()


def test_ctrl_c_of_the_follower_ends_the_job(site: Site) -> None:
    follower = site.start("launch", str(site.config(FOUR, sge=section())))
    site.wait_for_tasks(4)
    follower.send_signal(signal.SIGINT)
    code, output = site.finish(follower)
    assert code in (130, 143), output
    assert site.status()["state"] == "stopped"
    site.nothing_is_left()


def test_a_launcher_that_is_killed_leaves_nothing(site: Site) -> None:
    follower = site.start("launch", str(site.config(FOUR, sge=section())))
    site.wait_for_tasks(4)
    launchers = [
        process.pid
        for host in site.rig.nodes
        for process in host.processes()
        if "--submitted" in process.argv
    ]
    (launcher,) = launchers
    os.kill(launcher, signal.SIGKILL)
    code, output = site.finish(follower)
    assert code not in (0, 99, 100, 255), output
    site.nothing_is_left()
    assert site.status()["state"] in ("failed", "lost")


OWN_SCRIPT = """\
#!/bin/bash
#$ -S /bin/bash
#$ -j y
cd {root} || exit 4
export TFCLUSTER_STATE_DIR={state}
exec {python} -m tfcluster launch {config}
"""


def submit_own(site: Site, config: Path, *options: str) -> str:
    """Submit a user's own script, which runs ``tfcluster launch`` inside the job."""
    script = site.folder / "own.sh"
    text = OWN_SCRIPT.format(
        root=REPOSITORY, state=site.state, python=site.python, config=config
    )
    site.write(script, text)
    out = str(site.folder / "own.out")
    return site.sge("qsub", "-terse", *options, "-o", out, str(script)).split(".")[0]


def test_qdel_without_notify_leaves_nothing(site: Site) -> None:
    job = submit_own(site, site.config(FOUR), "-pe", "tf", "4").strip()
    site.wait_for_tasks(4)
    site.sge("qdel", job)
    site.nothing_is_left()
    assert site.status()["state"] == "lost"


def test_elements_of_an_array_have_names_of_their_own(site: Site) -> None:
    config = site.config({"worker": 1}, name="grid")
    submit_own(site, config, "-pe", "tf", "1", "-t", "1-2")
    names = ("grid-1", "grid-2")
    wait_for(lambda: len(site.runs()) == 2, "both runs")
    assert {run["name"] for run in site.runs()} == set(names)
    site.write(site.go, "")
    site.nothing_is_left()
    assert {run["state"] for run in site.runs()} == {"succeeded"}


def test_suspension_with_notice_does_not_end_the_run(site: Site) -> None:
    job = submit_own(site, site.config({"worker": 1}), "-notify", "-pe", "tf", "1")
    site.wait_for_tasks(1)
    (launcher,) = (
        process.pid
        for host in site.rig.nodes
        for process in host.processes()
        if "tfcluster" in process.argv and "launch" in process.argv
    )
    os.kill(launcher, signal.SIGUSR1)
    site.write(site.go, "")
    wait_for(lambda: site.status().get("state") == "succeeded", f"end of {job}")
    site.nothing_is_left()


def test_the_time_limit_is_distinguished_from_qdel(site: Site) -> None:
    limited = section(resources={"h_rt": "0:0:8"})
    follower = site.start("launch", str(site.config(FOUR, sge=limited)))
    code, output = site.finish(follower)
    assert code == 124, output
    site.nothing_is_left()


def test_qsub_reads_what_was_meant(site: Site) -> None:
    """``-verify`` shows how Grid Engine parsed the script."""
    wanted = section(
        slots=4,
        queue="all.q",
        resources={"h_rt": "1:00:00", "mem_free": "1G"},
        options=["-m", "n", "-p", "-5"],
    )
    shown = site.run("submit", str(site.config(FOUR, sge=wanted)), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    script = site.folder / "shown.sh"
    site.write(script, shown.stdout)
    said = site.sge("qsub", "-verify", str(script))
    known = {
        words[0]: " ".join(words[1:])
        for words in (line.split(":", 1) for line in said.splitlines())
        if len(words) == 2
    }
    facts = {key: " ".join(value.split()) for key, value in known.items()}
    assert facts["job_name"] == "cluster"
    assert facts["notify"] == "TRUE"
    assert facts["merge"] == "y"
    assert facts["restart"] == "n"
    assert facts["hard resource_list"] == "h_rt=1:00:00,mem_free=1G"
    assert facts["hard_queue_list"] == "all.q"
    assert facts["parallel environment"] == "tf range: 4"
    assert facts["priority"] == "-5"
    assert facts.get("env_list", "TERM").startswith("TERM"), "nothing of our own"
    assert not site.jobs()


def test_a_cluster_without_that_parallel_environment_says_so(site: Site) -> None:
    done = site.run("submit", str(site.config(FOUR, sge=section("nope"))))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "nope" in done.stderr
    assert "qconf -spl" in done.stderr
    assert site.status() == {}


def test_an_environment_without_control_of_its_slaves_is_explained(
    site: Site,
) -> None:
    head = site.rig.host("head")
    change = ("qconf", "-mattr", "pe", "control_slaves")
    head.output((*change, "FALSE", "tf_2"))
    try:
        follower = site.start("launch", str(site.config(FOUR, sge=section("tf_2"))))
        code, output = site.finish(follower)
    finally:
        head.output((*change, "TRUE", "tf_2"))
    assert code == 4, output
    assert "control_slaves TRUE" in output
    site.nothing_is_left()

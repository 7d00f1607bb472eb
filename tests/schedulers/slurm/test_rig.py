"""Launches under a real Slurm, from the login host and within jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.testbed import Testbed
from tests.rigs.testbed.layout import REPOSITORY
from tests.schedulers.sge.site import USER, Site, wait_for

FOUR = {"chief": 1, "worker": 3}


class SlurmSite(Site):
    """A user's folder on a rig with Slurm."""

    def launch_config(
        self,
        tasks: dict[str, Any] | None = None,
        restart: dict[str, Any] | None = None,
        **slurm: Any,
    ) -> str:
        given = {"nodes": 4, "tasks_per_node": 1, "time": "5", **slurm}
        section = {key: value for key, value in given.items() if value is not None}
        keys = {"backend": "slurm", "slurm": section, "restart": restart or {}}
        return str(self.config(tasks or FOUR, **keys))

    def slurm(self, *argv: str) -> str:
        return self.login.output(argv, user=USER, cwd=self.folder)

    def allocated(self, *argv: str, options: tuple[str, ...]) -> None:
        """Run ``argv`` within an allocation; it must succeed."""
        done = self.login.run(
            ("salloc", "--quiet", *options, *argv),
            user=USER,
            cwd=self.folder,
            env=self.variables(),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def jobs(self) -> list[str]:
        return self.slurm("squeue", "--noheader", "--format=%A").split()


@contextmanager
def site_for(rig: Testbed, name: str) -> Iterator[SlurmSite]:
    """A site in a folder named after ``name``; in the end, its jobs are cancelled."""
    folder = Path(rig.accounts[USER].home, re.sub(r"\W+", "-", name).strip("-"))
    rig.login.output(("mkdir", "-m", "700", "-p", str(folder)), user=USER)
    site = SlurmSite(rig, folder, sys.executable)
    try:
        yield site
    finally:
        for process in site.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
        rig.login.run(("scancel", f"--user={USER}"), user=USER)
        wait_for(lambda: not site.jobs(), "end of all jobs", 60.0)


@pytest.fixture
def site(testbed: Testbed, request: pytest.FixtureRequest) -> Iterator[SlurmSite]:
    with site_for(testbed, f"slurm-{request.node.name}") as site:
        yield site


def test_a_launch_from_the_login_host_submits_and_follows(site: SlurmSite) -> None:
    follower = site.start("launch", site.launch_config())
    said = site.wait_for_tasks(4)
    assert [said[task]["host"] for task in sorted(said)] == [
        "node1",
        "node2",
        "node3",
        "node4",
    ]
    clusters = [each["config"]["cluster"] for each in said.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    addresses = {a.rpartition(":")[0] for job in clusters[0].values() for a in job}
    assert len(addresses) == 4, "each host has an address of its own"
    assert site.status()["state"] == "running"
    site.write(site.go, "")
    code, output = site.finish(follower)
    assert code == 0, output
    assert "succeeded" in output
    assert site.status()["state"] == "succeeded"
    site.nothing_is_left()


FROM_PYTHON = """
import tfcluster, where
found = tfcluster.run(
    where.where,
    b"x",
    workers=4,
    backend="slurm",
    settings={"slurm.nodes": 4, "slurm.tasks_per_node": 1, "slurm.time": "5"},
    all_results=True,
)
print([host for _, host in found], found[3][0])
with tfcluster.launch(CONFIG) as run:
    lines = run.logs(follow=True)
    assert next(lines).startswith("task {")
print(run.wait(5).state)
later = {"slurm.options": ["--begin=now+1hour"]}
waits = tfcluster.launch(CONFIG, settings=later, detach=True)
print(waits.status()["state"], waits.stop().state)
"""
LATER = "--begin=now+1hour"
WHERE = "import os\ndef where(word): return word, os.uname().nodename\n"


def test_runs_of_a_python_program_are_jobs(site: SlurmSite) -> None:
    site.write(site.folder / "where.py", WHERE)
    text = FROM_PYTHON.replace("CONFIG", repr(site.launch_config()))
    site.write(site.folder / "program.py", text)
    done = site.login.run(
        (sys.executable, "program.py"),
        user=USER,
        cwd=site.folder,
        env=site.variables(),
        timeout_s=120.0,
    )
    assert done.stdout.splitlines() == [
        "['node1', 'node2', 'node3', 'node4'] b'x'",
        "stopped",
        "starting stopped",
    ], done.stderr
    site.nothing_is_left()


def test_a_job_that_waits_says_why_and_ends_with_ctrl_c(site: SlurmSite) -> None:
    follower = site.start("launch", site.launch_config(options=[LATER]))
    wait_for(lambda: "BeginTime" in site.reason(), "Slurm's reason")
    wait_for(lambda: "BeginTime" in site.heard.read_text(), "follower's word")
    follower.send_signal(signal.SIGINT)
    code, output = site.finish(follower)
    assert code == 130, output
    assert site.status()["state"] == "stopped"
    site.nothing_is_left()


def test_stop_ends_a_job_that_waits_and_one_that_runs(site: SlurmSite) -> None:
    config = site.launch_config()
    site.run("launch", "-d", config)
    site.wait_for_tasks(4)
    assert site.run("stop").returncode == 0
    assert site.status()["state"] == "stopped"
    site.nothing_is_left()
    site.run("launch", "-d", site.launch_config(options=[LATER]))
    assert site.run("stop").returncode == 0
    assert [run["state"] for run in site.runs()] == ["stopped", "stopped"]
    site.nothing_is_left()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ((), 143),
        (("--full",), 143),
        (("--batch", "--signal=TERM"), 143),
        (("--signal=TERM",), 143),
        (("--batch", "--signal=USR1"), 124),
    ],
)
def test_scancel_lets_the_run_stop_and_leaves_nothing(
    site: SlurmSite, how: tuple[str, ...], code: int
) -> None:
    follower = site.start("launch", site.launch_config())
    site.wait_for_tasks(4)
    (job,) = site.jobs()
    site.slurm("scancel", *how, job)
    ended, output = site.finish(follower)
    assert ended == code, output
    assert site.status()["state"] == "stopped"
    tasks = site.status()["tasks"]
    assert {task["state"] for task in tasks} == {"stopped"}, tasks
    site.nothing_is_left()


def test_ctrl_c_of_the_follower_cancels(site: SlurmSite) -> None:
    follower = site.start("launch", site.launch_config())
    site.wait_for_tasks(4)
    follower.send_signal(signal.SIGINT)
    code, output = site.finish(follower)
    assert code == 130, output
    site.nothing_is_left()


def test_a_requeued_job_is_a_run_of_its_own(site: SlurmSite) -> None:
    follower = site.start("launch", site.launch_config())
    site.wait_for_tasks(4)
    (job,) = site.jobs()
    site.slurm("scontrol", "requeue", job)
    wait_for(lambda: site.status().get("exit_code") == 75, "the end of the first run")
    first = site.status()
    log = Path(first["tasks"][0]["log"]).read_bytes()
    # Slurm sets the new start time, in two minutes, only when the old processes are
    # gone. A start in the same second as their end would be refused by a node.
    queue = ("squeue", "--noheader", "--format=%T %r")
    wait_for(lambda: site.slurm(*queue).split() == ["PENDING", "BeginTime"], "requeue")
    site.slurm("scontrol", "update", f"jobid={job}", "starttime=now+2")
    wait_for(
        lambda: [run["state"] for run in site.runs()] == ["running", "stopped"],
        "a second run",
    )
    site.write(site.go, "")
    code, output = site.finish(follower)
    assert code == 0, output
    assert Path(first["tasks"][0]["log"]).read_bytes() == log
    site.nothing_is_left()


LONG_S = 150.0
"""Slurm looks at limits and starts requeued jobs only from time to time."""


def end_soon(site: SlurmSite, job: str) -> None:
    """Shorten the job so that its limit is announced now; the least limit is 60 s."""
    site.slurm("scontrol", "update", f"jobid={job}", "endtime=now+5")


def start_again(site: SlurmSite, job: str, runs: int) -> None:
    """Let a requeued job begin now, not in two minutes, and wait for its run."""
    queue = ("squeue", "--noheader", "--format=%T %r")
    waits = ["PENDING", "BeginTime"]
    wait_for(lambda: site.slurm(*queue).split() == waits, "requeue", LONG_S)
    site.slurm("scontrol", "update", f"jobid={job}", "starttime=now+2")
    states = ["running", *(runs - 1) * ["stopped"]]
    wait_for(
        lambda: [run["state"] for run in site.runs()] == states, f"run {runs}", LONG_S
    )


def test_a_job_at_its_time_limit_is_requeued_and_goes_on(site: SlurmSite) -> None:
    config = site.launch_config(restart={"max": 2, "on_time_limit": "requeue"})
    follower = site.start("launch", config)
    site.wait_for_tasks(4)
    (job,) = site.jobs()
    end_soon(site, job)
    wait_for(lambda: site.status().get("exit_code") == 124, "time limit", LONG_S)
    first = site.status()
    assert {task["state"] for task in first["tasks"]} == {"stopped"}
    assert "requeued after the time limit (1st time; restart 1 of 2)" in first["reason"]
    waits = wait_for(lambda: "is pending" in site.reason() and site.reason(), "status")
    assert f"job {job} is pending" in waits
    word = f"job {job} is pending: BeginTime"
    wait_for(lambda: word in site.heard.read_text(), "the follower's word", LONG_S)
    start_again(site, job, 2)
    second = site.status()
    assert (second["follows"], second["requeues"]) == (first["run"], 1)
    shown = site.run("status").stdout
    assert f"continues {first['run']} (requeued after the time limit, 1st" in shown
    assert site.runs()[1]["continued_as"] == second["run"]
    # A signal of Slurm announces the limit; this one is the same.
    site.slurm("scancel", "--batch", "--signal=USR1", job)
    start_again(site, job, 3)
    assert site.status()["requeues"] == 2
    site.slurm("scancel", "--batch", "--signal=USR1", job)
    code, output = site.finish(follower)
    assert code == 124, output
    assert "it was not requeued: all 2 restarts are used (restart.max)" in output
    site.nothing_is_left()
    assert not list(site.state.glob("runs/*/job-input.json"))


OWN_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5 --output={folder}/own.out
#SBATCH --open-mode=append
cd {root} || exit 4
export TFCLUSTER_STATE_DIR={state}
exec {python} -m tfcluster launch {config}
"""


def submit_own(site: SlurmSite, *options: str) -> str:
    """Submit a user's own script, which runs ``tfcluster launch`` inside the job."""
    restart = {"max": 5, "on_time_limit": "requeue"}
    config = site.launch_config({"worker": 2}, restart, nodes=2)
    text = OWN_SCRIPT.format(
        folder=site.folder,
        root=REPOSITORY,
        state=site.state,
        python=site.python,
        config=config,
    )
    site.write(site.folder / "own.sh", text)
    script = str(site.folder / "own.sh")
    return site.slurm("sbatch", "--parsable", *options, script).strip()


def test_a_script_of_the_user_goes_on_and_can_be_stopped(site: SlurmSite) -> None:
    job = submit_own(site, "--requeue")
    site.wait_for_tasks(2)
    first = site.status()["run"]
    # Nothing announces the limit; at the limit, Slurm sends SIGTERM to everything.
    end_soon(site, job)
    start_again(site, job, 2)
    second = site.status()
    assert (second["follows"], second["requeues"]) == (first, 1)
    site.slurm("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: f"job {job} is pending" in site.reason(), "the second requeue")
    assert "2nd time" in site.reason()
    # The first run was continued by the second one, whose job waits.
    stopped = site.run("stop", first)
    assert stopped.returncode == 0, stopped.stderr
    assert f"{first} continues as {second['run']}" in stopped.stderr
    site.nothing_is_left()
    assert f"job {job}" in site.reason()
    assert "before it started again" in site.reason()


def test_a_script_that_may_not_be_requeued_is_refused_at_once(site: SlurmSite) -> None:
    job = submit_own(site, "--no-requeue")
    site.nothing_is_left()
    said = (site.folder / "own.out").read_text()
    assert f"but job {job} may not be requeued (Requeue=0)" in said
    assert "sbatch --requeue" in said
    assert site.runs() == []


def test_preemption_is_distinguished_from_scancel(site: SlurmSite) -> None:
    """A job of the partition ``urgent`` preempts a job of ``spot``."""
    site.start("launch", site.launch_config(partition="spot"))
    site.wait_for_tasks(4)
    urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=true")
    site.slurm("sbatch", *urgent)
    wait_for(lambda: site.status().get("exit_code") is not None, "the first run's end")
    assert site.status()["exit_code"] == 75
    site.slurm("scancel", "--user=" + USER)
    site.nothing_is_left()


def test_the_time_limit_is_announced_before_it_is_reached(site: SlurmSite) -> None:
    follower = site.start("launch", site.launch_config(time="0:20"))
    site.wait_for_tasks(4)
    code, output = site.finish(follower, 150.0)
    assert code == 124, output
    tasks = site.status()["tasks"]
    assert {task["state"] for task in tasks} == {"stopped"}, tasks
    site.nothing_is_left()


def test_an_existing_allocation_is_used(site: SlurmSite) -> None:
    config = site.launch_config()
    site.write(site.go, "")
    options = ("--nodes=4", "--ntasks-per-node=1")
    site.allocated(*site.argv("launch", config), options=options)
    assert {each["host"] for each in site.said().values()} == {
        f"node{number}" for number in range(1, 5)
    }
    site.nothing_is_left()


def test_a_plan_in_an_allocation_shows_its_nodes_and_their_gpus(
    site: SlurmSite,
) -> None:
    config = site.launch_config({"worker": 4}, nodes=2, tasks_per_node=2)
    plan = site.folder / "plan.json"
    argv = site.argv("plan", "--json", config)
    options = ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2")
    site.allocated("sh", "-c", f"{shlex.join(argv)} > {plan}", options=options)
    shown = json.loads(plan.read_text())
    assert [(host["slots"], host["gpus"]) for host in shown["hosts"]] == [(2, 2)] * 2
    assert all(re.fullmatch("node[1-4]", host["host"]) for host in shown["hosts"])
    assert site.runs() == []


def test_the_gpus_of_a_node_are_shared_out_by_the_names_it_gives(
    site: SlurmSite,
) -> None:
    config = site.launch_config({"worker": 4}, nodes=2, tasks_per_node=2)
    site.write(site.go, "")
    options = ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2")
    site.allocated(*site.argv("launch", config), options=options)
    (plan,) = site.state.glob("runs/*/plan.json")
    devices = re.findall(r'"CUDA_VISIBLE_DEVICES": "([0-9,]*)"', plan.read_text())
    assert devices == ["0", "1", "0", "1"]


GPUS = {"worker": {"count": 4, "gpus": 1}}


@pytest.mark.parametrize(
    ("slurm", "devices"),
    [
        ({"nodes": 2}, ["0", "1", "0", "1"]),
        ({"nodes": None}, ["0", "1", "0", "1"]),
        ({"nodes": 4, "mem": "100MB", "time": "5m"}, ["0", "0", "0", "0"]),
    ],
)
def test_a_job_gets_what_its_tasks_need(
    site: SlurmSite, slurm: dict[str, Any], devices: list[str]
) -> None:
    site.write(site.go, "")
    unset = {"tasks_per_node": None, **slurm}
    follower = site.start("launch", site.launch_config(GPUS, **unset))
    code, output = site.finish(follower)
    assert code == 0, output
    (plan,) = site.state.glob("runs/*/plan.json")
    found = re.findall(r'"CUDA_VISIBLE_DEVICES": "([0-9,]*)"', plan.read_text())
    assert found == devices


def test_a_step_has_the_nodes_of_the_step(site: SlurmSite) -> None:
    config = site.launch_config({"worker": 2}, nodes=2, tasks_per_node=None)
    plan = site.folder / "plan.json"
    words = f"{shlex.join(site.argv('plan', '--json', config))} > {plan}"
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node3")
    options = ("--nodelist=node[1-4]", "--nodes=4")
    site.allocated(*step, "sh", "-c", words, options=options)
    hosts = [host["host"] for host in json.loads(plan.read_text())["hosts"]]
    assert hosts == ["node3"]


def test_a_refusal_is_for_people_and_leaves_no_run(site: SlurmSite) -> None:
    done = site.run("submit", site.launch_config(partition="nope"))
    assert done.returncode == 4
    assert "nope" in done.stderr
    assert "sinfo" in done.stderr
    assert site.runs() == []


def test_sbatch_reads_what_was_meant(site: SlurmSite) -> None:
    """The real sbatch accepts a script with values that are hard to quote."""
    odd = ["--comment=a # b; $(id) `id`", "--mail-user=x y"]
    shown = site.run("submit", site.launch_config(options=odd), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    script = site.folder / "shown.sh"
    site.write(script, shown.stdout)
    site.slurm("sbatch", "--test-only", str(script))
    job = site.slurm("sbatch", "--parsable", "--hold", str(script)).strip()
    known = site.slurm("scontrol", "show", "job", job)
    assert f"Comment={odd[0].partition('=')[2]}" in known
    assert "NumNodes=4" in known
    assert "TimeLimit=00:05:00" in known


def test_a_launcher_that_is_killed_leaves_nothing(site: SlurmSite) -> None:
    follower = site.start("launch", site.launch_config())
    site.wait_for_tasks(4)
    (launcher,) = (
        process.pid
        for host in site.rig.nodes
        for process in host.processes()
        if "--submitted" in process.argv
    )
    os.kill(launcher, signal.SIGKILL)
    code, output = site.finish(follower)
    assert code == 5, output
    assert "lost: " in output
    site.nothing_is_left()
    assert site.status()["state"] == "lost"

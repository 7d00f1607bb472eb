"""LSF by its documentation: no LSF was at hand, so programs stand for its commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plan.descriptions import describe
from tests.schedulers.standins import (
    LAUNCHER,
    directives,
    env_of,
    program,
    saying,
)
from tests.schedulers.test_file_starter import read_frames
from tfcluster.base.errors import ConfigError, ExitCode, StartError
from tfcluster.plan.model import Description, Host, TaskGroup
from tfcluster.schedulers.base import (
    CommandAnswer,
    JobPhase,
    JobState,
    SchedulerError,
    asker,
)
from tfcluster.schedulers.lsf import SCHEDULER
from tfcluster.schedulers.options import Mistake
from tfcluster.schedulers.script import job_script, option_mistakes


def job(tasks: int = 4, gpus: int | None = None, **lsf: Any) -> Description:
    group = TaskGroup(count=tasks, gpus=gpus)
    return describe({"worker": group}, name="digits", backend="lsf", lsf=lsf)


def found_in(description: Description) -> list[Mistake]:
    settings = SCHEDULER.settings_in(description)
    refused = option_mistakes(SCHEDULER, description)
    return [*refused, *SCHEDULER.mistakes(description, settings)]


def asked(description: Description) -> list[str]:
    return directives(SCHEDULER, description, "#BSUB ")


@pytest.mark.parametrize(
    ("lsf", "gpus", "expected"),
    [
        ({}, None, {"-n 4"}),
        ({"tasks_per_node": 2}, 1, {'-R "span[ptile=2]"', '-gpu "num=2"'}),
        ({"gpus_per_node": 8}, None, {'-gpu "num=8"'}),
        (
            {"mem": "16G", "queue": "normal"},
            None,
            {'-R "rusage[mem=16G]"', "-q normal"},
        ),
        ({"time": "90"}, None, {"-W 1:30", "-wa USR1", "-wt 1"}),
        (
            {"options": ["-R", "select[mem>4000 && ncpus>2]", "-x"]},
            None,
            {'-R "select[mem>4000 && ncpus>2]"', "-x"},
        ),
    ],
)
def test_the_directives(
    lsf: dict[str, Any], gpus: int | None, expected: set[str]
) -> None:
    found = asked(job(gpus=gpus, **lsf))
    assert expected | {"-J digits", '-env "none"', "-rn"} <= set(found)


def test_the_script() -> None:
    lines = job_script(SCHEDULER, job(), LAUNCHER).splitlines()
    assert lines.index(f"exec >> {LAUNCHER.log} 2>&1") < len(lines) - 2
    assert lines[-1].endswith(f"launch --submitted {LAUNCHER.folder}")
    done = subprocess.run(
        ["bash", "-n"], input="\n".join(lines), text=True, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("options", "index", "message"),
    [
        (["-J", "x[1-3]"], 0, "option -J is not allowed"),
        (["-x", "-K"], 1, "option -K is not allowed"),
        (["-Is"], 0, "option -Is is not allowed"),
        (["-env", "all"], 0, "option -env is not allowed"),
        (["normal"], 0, "'normal' is not an option"),
        (["-R", 'a"b'], 1, "cannot be used in a directive of bsub"),
        (["-R", "a\n#BSUB -K"], 1, "cannot be used in a directive of bsub"),
    ],
)
def test_refused_options(options: list[str], index: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_script(SCHEDULER, job(options=options), LAUNCHER)
    (problem,) = caught.value.problems
    assert problem.where == f"lsf.options.{index}"
    assert message in problem.message


def test_contradictions() -> None:
    twice = job(queue="a", options=["-q", "b"])
    assert [each.key for each in found_in(twice)] == ["lsf.options.0"]
    wide = job(tasks_per_node=9)
    assert [each.key for each in found_in(wide)] == ["lsf.tasks_per_node"]


def test_bsub_reads_the_script(tmp_path: Path) -> None:
    program(tmp_path, "bsub", 'cat > "$(dirname "$0")/got"; echo "$SAYS"\n')
    script = tmp_path / "a job.sh"
    script.write_text("#BSUB -n 4\n")
    says = "Job <4711> is submitted to default queue <normal>."
    env = env_of(tmp_path, {"SAYS": says})
    assert SCHEDULER.submit(script, asker(env)) == "4711"
    assert (tmp_path / "got").read_text() == "#BSUB -n 4\n"


def test_a_refusal() -> None:
    refusal = CommandAnswer(255, "", "nope: No such queue. Job not submitted.\n")
    with pytest.raises(SchedulerError, match="nope: No such queue") as caught:
        SCHEDULER.submit(Path("job.sh"), saying(refusal))
    assert "bqueues" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("RUN|-|-|-\n", JobState(JobPhase.RUNNING, "RUN")),
        ("SSUSP|-|-|-\n", JobState(JobPhase.RUNNING, "SSUSP")),
        (
            "PEND|-|-|New job is waiting for scheduling;\n",
            JobState(JobPhase.PENDING, "PEND", "New job is waiting for scheduling;"),
        ),
        (
            "PSUSP|-|-|-\n",
            JobState(JobPhase.PENDING, "PSUSP", "`bresume 12` releases it"),
        ),
        ("DONE|-|-|-\n", JobState(JobPhase.OVER, "DONE")),
        ("EXIT|9|-|-\n", JobState(JobPhase.OVER, "EXIT", "exit status 9")),
        (
            "EXIT|140|TERM_RUNLIMIT: job killed after reaching LSF run time limit|-\n",
            JobState(
                JobPhase.OVER,
                "EXIT",
                "TERM_RUNLIMIT: job killed after reaching LSF run time limit",
            ),
        ),
    ],
)
def test_how_a_job_stands(said: str, state: JobState) -> None:
    assert SCHEDULER.state("12", saying(CommandAnswer(0, said))) == state


def test_a_job_that_is_forgotten_is_gone_and_silence_is_not() -> None:
    gone = CommandAnswer(255, "", "Job <12> is not found\n")
    assert SCHEDULER.state("12", saying(gone)).phase is JobPhase.GONE
    silence = CommandAnswer(255, "", "LSF is down. Please wait ...\n")
    with pytest.raises(SchedulerError, match="LSF is down"):
        SCHEDULER.state("12", saying(silence))


def inside(
    folder: Path, hosts: str = "here 2 n2.site 1", **more: str
) -> dict[str, str]:
    given = {"LSB_JOBID": "12", "LSB_MCPU_HOSTS": hosts, "LSB_JOBINDEX": "0"}
    return env_of(folder, {**given, **more})


def test_hosts_and_slots(tmp_path: Path) -> None:
    env = inside(tmp_path)
    found = SCHEDULER.allocate(job(), env).hosts
    expected = [("here", 2), ("n2.site", 1)]
    assert [(host.name, host.slots) for host in found] == expected
    file = tmp_path / "hosts"
    file.write_text("n3\nhere\nn3\n")
    env["LSB_DJOB_HOSTFILE"] = str(file)
    found = SCHEDULER.allocate(job(), env).hosts
    assert [(host.name, host.slots) for host in found] == [("n3", 2), ("here", 1)]
    assert SCHEDULER.array_index(env) is None
    assert SCHEDULER.array_index({**env, "LSB_JOBINDEX": "3"}) == "3"


@pytest.mark.parametrize("hosts", ["a", "a x", "-o 1", "a 1 b", "a 0"])
def test_variables_that_are_none(hosts: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LSB_MCPU_HOSTS="):
        SCHEDULER.allocate(job(), inside(tmp_path, hosts))
    with pytest.raises(StartError, match="not inside a job of LSF"):
        SCHEDULER.allocate(job(), {})


BLAUNCH = 'echo "$1" >> "$(dirname "$0")/asked"; shift; exec "$@" < /dev/null\n'


def test_an_agent_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "blaunch", BLAUNCH)
    env = inside(tmp_path)
    monkeypatch.setenv("PATH", env["PATH"])  # as that of the launcher in the job
    description = describe({"worker": 1}, python=(sys.executable,))
    channel = SCHEDULER.starter(description, env).start_agent(Host(name="n2.site"))
    assert read_frames(channel)
    assert (tmp_path / "asked").read_text().split() == ["n2.site"]


def test_gpus_are_asked_for_on_each_host(tmp_path: Path) -> None:
    program(tmp_path, "blaunch", f"export CUDA_VISIBLE_DEVICES=2,3\n{BLAUNCH}")
    env = inside(tmp_path, "here 1 n2 1", CUDA_VISIBLE_DEVICES="0,1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", env["PATH"])
        found = SCHEDULER.allocate(job(2, gpus=2), env).hosts
    assert [host.gpus for host in found] == [("0", "1"), ("2", "3")]


def test_why_a_job_ends(tmp_path: Path) -> None:
    env = inside(tmp_path)
    assert SCHEDULER.why_ending(env) is None
    program(tmp_path, "bjobs", 'echo "$USED second(s)|60.0/here"\n')
    assert SCHEDULER.why_ending({**env, "USED": "3600"}) is ExitCode.TIME_LIMIT
    assert SCHEDULER.why_ending({**env, "USED": "120"}) is None

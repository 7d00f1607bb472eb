"""PBS by its documentation: no PBS was at hand, so programs stand for its commands."""

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
from tfcluster.schedulers.base import CommandAnswer, JobPhase, JobState, SchedulerError
from tfcluster.schedulers.options import Mistake
from tfcluster.schedulers.pbs import SCHEDULER
from tfcluster.schedulers.script import job_script, option_mistakes


def job(tasks: int = 4, gpus: int | None = None, **pbs: Any) -> Description:
    group = TaskGroup(count=tasks, gpus=gpus)
    return describe({"worker": group}, name="digits", backend="pbs", pbs=pbs)


def found_in(description: Description) -> list[Mistake]:
    settings = SCHEDULER.settings_in(description)
    refused = option_mistakes(SCHEDULER, description)
    return [*refused, *SCHEDULER.mistakes(description, settings)]


def asked(description: Description) -> list[str]:
    return directives(SCHEDULER, description, "#PBS ")


@pytest.mark.parametrize(
    ("pbs", "gpus", "select"),
    [
        ({}, None, "select=4:ncpus=1:mpiprocs=1"),
        ({"nodes": 2, "cpus_per_task": 8}, None, "select=2:ncpus=16:mpiprocs=2"),
        ({"tasks_per_node": 3}, None, "select=2:ncpus=3:mpiprocs=3"),
        ({"nodes": 2, "mem": "16G"}, 1, "select=2:ncpus=2:mpiprocs=2:mem=16gb:ngpus=2"),
        ({"gpus_per_node": 3}, None, "select=4:ncpus=1:mpiprocs=1:ngpus=3"),
    ],
)
def test_the_size_follows_from_the_tasks(
    pbs: dict[str, Any], gpus: int | None, select: str
) -> None:
    found = asked(job(gpus=gpus, **pbs))
    assert f"-l {select}" in found
    assert ("-l place=scatter" in found) == ("nodes" in pbs)


def test_the_script() -> None:
    description = job(
        time="4:00:00", queue="workq", options=["-l", "place=excl", "-Px"]
    )
    found = asked(description)
    assert {"-N digits", "-l walltime=04:00:00", "-q workq", "-Px"} <= set(found)
    assert {"-l place=excl", "-r n", "-j oe"} <= set(found)
    lines = job_script(SCHEDULER, description, LAUNCHER).splitlines()
    assert lines.index(f"exec >> {LAUNCHER.log} 2>&1") < len(lines) - 2
    assert lines[-1].endswith(f"launch --submitted {LAUNCHER.folder}")
    done = subprocess.run(
        ["bash", "-n"], input="\n".join(lines), text=True, check=False
    )
    assert done.returncode == 0


def test_a_size_in_the_options_takes_the_place_of_ours() -> None:
    found = asked(job(options=["-l", "nodes=2:ppn=2"]))
    assert [each for each in found if each.startswith("-l")] == ["-l nodes=2:ppn=2"]


@pytest.mark.parametrize(
    ("options", "index", "message"),
    [
        (["-J", "1-3"], 0, "option -J is not allowed"),
        (["-J1-3"], 0, "option -J is not allowed"),
        (["-l", "x=1", "-V"], 2, "option -V is not allowed"),
        (["-W", "block=true"], 1, "option -W block is not allowed"),
        (["x"], 0, "'x' is not an option"),
        (["-l", "a b"], 1, "'a b' cannot be used in a directive of qsub"),
        (["-l", "x=1\n#PBS -V"], 1, "cannot be used in a directive of qsub"),
    ],
)
def test_refused_options(options: list[str], index: int, message: str) -> None:
    description = job(options=options)
    with pytest.raises(ConfigError) as caught:
        job_script(SCHEDULER, description, LAUNCHER)
    (problem,) = caught.value.problems
    assert problem.where == f"pbs.options.{index}"
    assert message in problem.message


@pytest.mark.parametrize(
    ("pbs", "key"),
    [
        ({"nodes": 9}, "pbs.nodes"),
        ({"nodes": 2, "tasks_per_node": 1}, "pbs.tasks_per_node"),
        ({"queue": "a", "options": ["-q", "b"]}, "pbs.options.0"),
        ({"nodes": 2, "options": ["-l", "select=2"]}, "pbs.options.1"),
    ],
)
def test_contradictions(pbs: dict[str, Any], key: str) -> None:
    assert [each.key for each in found_in(job(**pbs))] == [key]


def test_the_id_of_a_job() -> None:
    script = Path("/r/job.sh")
    said = "a word of a hook\n12.pbs-server\n"
    assert SCHEDULER.submit(script, saying(CommandAnswer(0, said))) == "12.pbs-server"
    refusal = CommandAnswer(170, "", "qsub: Unknown queue\n")
    with pytest.raises(
        SchedulerError, match="qsub refused the job: Unknown queue"
    ) as e:
        SCHEDULER.submit(script, saying(refusal))
    assert "qstat -Q" in str(e.value.hint)


def in_json(**facts: Any) -> CommandAnswer:
    import json

    jobs = {"Jobs": {"12.pbs": facts}, "pbs_version": "23.06.06", "timestamp": 1}
    return CommandAnswer(0, json.dumps(jobs))


IN_TEXT = """\
Job Id: 12.pbs
    Job_Name = digits
    job_state = Q
    Resource_List.walltime = 01:00:00
    comment = Not Running: Not enough of the right
\ttype of nodes

"""


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ([in_json(job_state="R")], JobState(JobPhase.RUNNING, "running")),
        (
            [in_json(job_state="Q", comment="Not Running: Insufficient ncpus")],
            JobState(JobPhase.PENDING, "queued", "Not Running: Insufficient ncpus"),
        ),
        (
            [in_json(job_state="H")],
            JobState(JobPhase.PENDING, "held", "`qrls 12.pbs` releases it"),
        ),
        (
            [in_json(job_state="F", Exit_status=271, comment="Job run at ...")],
            JobState(JobPhase.OVER, "finished", "exit status 271"),
        ),
        (
            [CommandAnswer(153, "", "qstat: Unknown Job Id 12.pbs\n")],
            JobState(JobPhase.GONE, "gone"),
        ),
        (
            [
                CommandAnswer(2, "", "qstat: invalid option -- 'F'\n"),
                CommandAnswer(0, IN_TEXT),
            ],
            JobState(
                JobPhase.PENDING,
                "queued",
                "Not Running: Not enough of the righttype of nodes",
            ),
        ),
    ],
)
def test_how_a_job_stands(answers: list[CommandAnswer], state: JobState) -> None:
    assert SCHEDULER.state("12.pbs", saying(*answers)) == state


def test_silence_is_no_end() -> None:
    silence = CommandAnswer(
        111, "", "qstat: cannot connect to server pbs (errno=111)\n"
    )
    with pytest.raises(SchedulerError, match="cannot connect"):
        SCHEDULER.state("12.pbs", saying(silence))


def inside(folder: Path, lines: str, **more: str) -> dict[str, str]:
    nodefile = folder / "nodefile"
    nodefile.write_text(lines)
    given = {"PBS_JOBID": "12.pbs", "PBS_NODEFILE": str(nodefile), "PBS_QUEUE": "workq"}
    return env_of(folder, {**given, **more})


def test_hosts_and_slots(tmp_path: Path) -> None:
    env = inside(tmp_path, "here.site\nn2.site\nn2.site\nhere.site\n")
    found = SCHEDULER.allocate(job(), env).hosts
    assert [(host.name, host.slots) for host in found] == [
        ("here.site", 2),
        ("n2.site", 2),
    ]
    assert SCHEDULER.is_inside(env)
    assert SCHEDULER.array_index({**env, "PBS_ARRAY_INDEX": "3"}) == "3"


@pytest.mark.parametrize("lines", ["", "-oProxyCommand=x\n"])
def test_a_file_that_is_none(lines: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PBS_NODEFILE="):
        SCHEDULER.allocate(job(), inside(tmp_path, lines))
    with pytest.raises(StartError, match="not inside a job of PBS"):
        SCHEDULER.allocate(job(), {})


# As documented, the command and its words reach a process without standard input.
TMRSH = 'echo "$1" >> "$(dirname "$0")/asked"; shift; exec "$@" < /dev/null\n'
PBSDSH = '[ "$1" = -n ] || exit 9; shift\n' + TMRSH


@pytest.mark.parametrize(
    ("name", "text", "asked"), [("pbs_tmrsh", TMRSH, "n2"), ("pbsdsh", PBSDSH, "2")]
)
def test_an_agent_on_another_host(
    name: str, text: str, asked: str, tmp_path: Path
) -> None:
    program(tmp_path, name, text)
    env = inside(tmp_path, "here\nhere\nn2\n")
    description = describe({"worker": 1}, python=(sys.executable,))
    channel = SCHEDULER.starter(description, env).start_agent(Host(name="n2"))
    assert read_frames(channel)
    assert (tmp_path / "asked").read_text().split() == [asked]
    assert not list((tmp_path / "state").iterdir())


def test_gpus_are_asked_for_on_each_host(tmp_path: Path) -> None:
    program(tmp_path, "pbs_tmrsh", f"export CUDA_VISIBLE_DEVICES=2,3\n{TMRSH}")
    env = inside(tmp_path, "here\nn2\n", CUDA_VISIBLE_DEVICES="0,1")
    found = SCHEDULER.allocate(job(2, gpus=2), env).hosts
    assert [host.gpus for host in found] == [("0", "1"), ("2", "3")]


QSTAT = """\
case "$1" in
-Q) echo '{"Queue": {"workq": {"queue_type": "Execution", "kill_delay": 30}}}' ;;
*) echo '{"Jobs": {"12.pbs": {"job_state": "E", "Resource_List":
  {"walltime": "01:00:00"}, "resources_used": {"walltime": "'$USED'"}}}}' ;;
esac
"""


def test_how_long_an_end_may_take_and_why_it_comes(tmp_path: Path) -> None:
    env = inside(tmp_path, "here\n")
    assert SCHEDULER.longest_grace_s(env) is None
    assert SCHEDULER.why_ending(env) is None
    program(tmp_path, "qstat", QSTAT)
    assert SCHEDULER.longest_grace_s(env) == 25.0
    assert SCHEDULER.why_ending({**env, "USED": "00:59:30"}) is ExitCode.TIME_LIMIT
    assert SCHEDULER.why_ending({**env, "USED": "00:10:00"}) is None

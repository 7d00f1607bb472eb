"""Parses the answers of Slurm's commands, recorded from Slurm 22.05 to 24.11."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.schedulers.base import CommandAnswer, JobPhase, JobState, SchedulerError
from tfcluster.schedulers.slurm import SCHEDULER


@pytest.mark.parametrize(
    ("said", "job"),
    [
        ("12\n", "12"),
        ("12;cluster-b\n", "12"),
        ("a word of the prolog\n4711\n", "4711"),
    ],
)
def test_the_job_s_id(said: str, job: str) -> None:
    assert SCHEDULER.submit(Path("job.sh"), lambda _: CommandAnswer(0, said)) == job


@pytest.mark.parametrize(
    ("answer", "said", "hint"),
    [
        (
            CommandAnswer(
                1,
                "",
                "sbatch: error: invalid partition specified: nope\n"
                "sbatch: error: Batch job submission failed: Invalid partition name "
                "specified\n",
            ),
            "invalid partition specified: nope",
            "`sinfo` lists the partitions",
        ),
        (
            CommandAnswer(
                1,
                "",
                "sbatch: error: Batch job submission failed: Requested node "
                "configuration is not available\n",
            ),
            "Requested node configuration is not available",
            "`sinfo -N -l` shows what nodes have",
        ),
        (CommandAnswer(127, "", "sbatch is not on the PATH"), "not on the PATH", None),
        (CommandAnswer(0, "Submitted batch job\n"), "job: Submitted batch job", None),
        (CommandAnswer(0, ""), "no answer", None),
    ],
)
def test_a_refusal_is_for_people(
    answer: CommandAnswer, said: str, hint: str | None
) -> None:
    with pytest.raises(SchedulerError) as caught:
        SCHEDULER.submit(Path("job.sh"), lambda _: answer)
    assert said in caught.value.message
    assert "error:" not in caught.value.message
    if hint is not None:
        assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "PENDING|Resources\n",
            JobState(
                JobPhase.PENDING,
                "PENDING",
                "Resources: waits until enough nodes are free",
            ),
        ),
        (
            "PENDING|PartitionConfig\n",
            JobState(
                JobPhase.PENDING,
                "PENDING",
                "PartitionConfig: the partition cannot satisfy its request",
            ),
        ),
        (
            "PENDING|ReqNodeNotAvail, UnavailableNodes:node3\n",
            JobState(
                JobPhase.PENDING,
                "PENDING",
                "ReqNodeNotAvail, UnavailableNodes:node3: a node that it needs is "
                "not available",
            ),
        ),
        (
            "PENDING|SomethingNew\n",
            JobState(JobPhase.PENDING, "PENDING", "SomethingNew"),
        ),
        ("PENDING|None\n", JobState(JobPhase.PENDING, "PENDING")),
        ("CONFIGURING|None\n", JobState(JobPhase.PENDING, "CONFIGURING")),
        ("RUNNING|None\n", JobState(JobPhase.RUNNING, "RUNNING")),
        ("COMPLETING|None\n", JobState(JobPhase.RUNNING, "COMPLETING")),
        ("COMPLETED|None\n", JobState(JobPhase.OVER, "COMPLETED")),
        ("CANCELLED+|None\n", JobState(JobPhase.OVER, "CANCELLED+")),
        (
            "FAILED|NonZeroExitCode\n",
            JobState(JobPhase.OVER, "FAILED", "NonZeroExitCode"),
        ),
        ("TIMEOUT|TimeLimit\n", JobState(JobPhase.OVER, "TIMEOUT", "TimeLimit")),
        ("NODE_FAIL|None\n", JobState(JobPhase.OVER, "NODE_FAIL")),
        ("", JobState(JobPhase.GONE, "gone")),
    ],
)
def test_how_a_job_stands(said: str, expected: JobState) -> None:
    assert SCHEDULER.state("12", lambda _: CommandAnswer(0, said)) == expected


def test_a_job_that_is_forgotten_is_gone_and_silence_is_not() -> None:
    forgotten = "slurm_load_jobs error: Invalid job id specified\n"
    state = SCHEDULER.state("12", lambda _: CommandAnswer(1, "", forgotten))
    assert state.phase is JobPhase.GONE
    silence = "slurm_load_jobs error: Unable to contact slurm controller\n"
    with pytest.raises(SchedulerError, match="Unable to contact"):
        SCHEDULER.state("12", lambda _: CommandAnswer(1, "", silence))


def test_the_commands_of_slurm() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(argv: tuple[str, ...]) -> CommandAnswer:
        asked.append(argv)
        return CommandAnswer(0, "12\n")

    SCHEDULER.submit(Path("/r/job.sh"), ask)
    SCHEDULER.state("12", ask)
    assert asked[0] == ("sbatch", "--parsable", "/r/job.sh")
    assert "--jobs=12" in asked[1]
    gently = SCHEDULER.cancel_argvs("12")
    assert gently == (
        ("scancel", "--quiet", "--state=PENDING", "12"),
        ("scancel", "--quiet", "--batch", "--signal=INT", "12"),
    )
    assert SCHEDULER.kill_argv("12") == ("scancel", "--quiet", "12")

"""The srun command and environment of an agent, and explanations of its messages."""

from __future__ import annotations

import pytest

from tfcluster.schedulers.slurm.srun import (
    meaning,
    own_words,
    reason,
    step_argv,
    step_environ,
    words_about,
)


def test_the_step_shares_everything_and_passes_its_streams_on() -> None:
    argv = step_argv(["node3"], ("/opt/python", "-c", "x"))
    assert argv == (
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=node3",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--immediate=60",
        "--chdir=/",
        "--job-name=tfcluster",
        "--quiet",
        "--input=all",
        "/opt/python",
        "-c",
        "x",
    )


def test_one_step_may_have_many_hosts_that_end_each_by_itself() -> None:
    argv = step_argv(["a1", "a2", "a10"], ("x",), group=0)
    assert argv[:5] == (
        "srun",
        "--het-group=0",
        "--nodes=3",
        "--ntasks=3",
        "--nodelist=a1,a2,a10",
    )
    kept = {"--ntasks-per-node=1", "--no-kill", "--wait=0", "--label", "--overlap"}
    assert kept <= set(argv)
    assert argv[-1] == "x"


def test_what_a_step_says_of_one_host_is_found() -> None:
    said = (
        " 3: tfcluster: cannot store the agent\n"
        "13: of another task\n"
        "srun: error: node3: task 3: Exited with exit code 1\n"
        "srun: error: node30: task 13: Killed\n"
        "slurmstepd: error: *** STEP 7.0 ON node3 CANCELLED AT ... ***\n"
    )
    assert words_about(said, "node3", 3).splitlines() == [
        "tfcluster: cannot store the agent",
        "srun: error: node3: task 3: Exited with exit code 1",
        "slurmstepd: error: *** STEP 7.0 ON node3 CANCELLED AT ... ***",
    ]


def test_that_a_process_has_exited_is_no_reason() -> None:
    exited = "srun: error: node3: task 3: Exited with exit code 1"
    assert reason("") == ""
    assert reason(exited) == ""
    why = "tfcluster: cannot store the agent"
    assert reason(f"{exited}\n{why}") == reason(f"{why}\n{exited}") == why
    assert reason("srun: error: node3: task 3: Killed").endswith("Killed")


def test_a_component_is_named_where_there_are_several() -> None:
    assert step_argv(["a"], ("x",), group=1)[1] == "--het-group=1"


def test_what_would_shape_the_step_is_left_out_and_nothing_else() -> None:
    kept = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_CONF": "/x",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_GPUS": "2,3",
    }
    shaping = dict.fromkeys(
        (
            "SLURM_NTASKS",
            "SLURM_NPROCS",
            "SLURM_NTASKS_PER_NODE",
            "SLURM_EXPORT_ENV",
            "SLURM_GPUS_PER_TASK",
            "SLURM_CPUS_PER_TASK",
            "SRUN_CPUS_PER_TASK",
            "SLURM_MEM_PER_NODE",
            "SLURM_DISTRIBUTION",
            "SLURM_EXACT",
        ),
        "1",
    )
    assert step_environ({**kept, **shaping}) == kept


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # Recorded from Slurm 22.05 to 24.11.
        ("srun: error: Slurm job 38 has expired", "the job is over"),
        (
            "srun: error: Unable to confirm allocation for job 5: Invalid job id "
            "specified",
            "the job is over",
        ),
        (
            "srun: Job 9 step creation temporarily disabled, retrying (Requested nodes "
            "are busy)",
            "Slurm does not start the job step",
        ),
        (
            "srun: error: Unable to create step for job 9: Requested nodes are busy",
            "Slurm does not start the job step",
        ),
        (
            "srun: error: Task launch for StepId=9.0 failed on node node3: "
            "Communication connection failure",
            "Slurm cannot reach the node",
        ),
        (
            "slurmstepd-node1: error: execve(): /nope/python: No such file or directory"
            "\nsrun: error: node1: task 0: Exited with exit code 2",
            "the interpreter does not exist",
        ),
        (
            "srun: error: Unable to contact slurm controller (connect failure)",
            "Slurm's controller does not answer",
        ),
    ],
)
def test_messages_have_a_meaning(said: str, expected: str) -> None:
    found = meaning(said)
    assert found is not None
    assert found[0] == expected


def test_other_words_stay_as_they_are() -> None:
    assert meaning("Traceback (most recent call last):") is None
    own = "tfcluster: cannot store the agent in /a: No such file or directory"
    assert meaning(own) is None
    assert meaning(f" 3: {own}") is None


def test_the_first_error_is_quoted_without_its_prefix() -> None:
    said = "srun: hello\nsrun: error: it broke\nsrun: error: node1: task 0: Exited"
    assert own_words(said) == "it broke"
    assert own_words("") == ""

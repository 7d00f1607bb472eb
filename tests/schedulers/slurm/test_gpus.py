"""GPUs keep the names that nodes give them: not renumbered, never guessed."""

from __future__ import annotations

import subprocess

import pytest

from tfcluster.schedulers.slurm.srun import gpu_question_argv, has_gpus, parse_gpus


def test_names_are_taken_as_they_are() -> None:
    said = (
        "some banner\n"
        "tfcluster-gpus node1 2,3\n"
        "tfcluster-gpus node2 GPU-8f1d,MIG-33ab/1/0\n"
        "tfcluster-gpus node3 \n"
        "tfcluster-gpus node4 unset\n"
        "tfcluster-gpus node5 NoDevFiles\n"
    )
    assert parse_gpus(said) == {
        "node1": ("2", "3"),
        "node2": ("GPU-8f1d", "MIG-33ab/1/0"),
        "node3": (),
        "node4": None,
        "node5": (),
    }


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"node1": None}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"node1": ()}),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, {"node1": ("1", "0")}),
    ],
)
def test_the_question_is_answered_by_a_real_shell(
    variables: dict[str, str], expected: dict[str, tuple[str, ...] | None]
) -> None:
    argv = gpu_question_argv(["node1"])
    command = argv[argv.index("/bin/sh") :]
    done = subprocess.run(
        command,
        env={"SLURMD_NODENAME": "node1", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert parse_gpus(done.stdout) == expected


def test_every_node_is_asked_once() -> None:
    argv = gpu_question_argv(["node1", "node3"])
    assert {"--nodes=2", "--ntasks=2", "--nodelist=node1,node3"} <= set(argv)
    assert "--het-group=1" in gpu_question_argv(["node1"], group=1)
    assert "--gpus-per-node=4" in gpu_question_argv(["node1"], gpus=4)
    assert not any("gpus-per" in word for word in argv)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_GPUS_ON_NODE": "0"}, False),
        ({"SLURM_GPUS_ON_NODE": "2"}, True),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, True),
        ({"SLURM_JOB_GPUS": ""}, False),
        ({"SLURM_JOB_GPUS": "0"}, True),
        ({"SLURM_JOB_GPUS": "0,1"}, True),
    ],
)
def test_signs_of_gpus(variables: dict[str, str], expected: bool) -> None:
    assert has_gpus(variables) is expected

"""A job's input is read back unchanged, is private to its owner, and is removed."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.descriptions import describe
from tfcluster.base.errors import StartError
from tfcluster.plan.model import (
    Description,
    Host,
    PortRange,
    Runtime,
    Secret,
    Strategy,
    TaskGroup,
)
from tfcluster.record.paths import RunPaths, create_run, state_dir
from tfcluster.submit.job import forget_secrets, read_job_input, write_job_input


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    state = state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "state")})
    return create_run(state, "test", 0.0)


def full() -> Description:
    """A description with values of every kind."""
    return describe(
        {"chief": TaskGroup(gpus=1, env={"A": "é\udcff"}), "worker": 3},
        backend="slurm",
        command=("python", "-c", "print('\n')"),
        env={"OMP_NUM_THREADS": "1"},
        hosts=(Host(name="a", slots=2), Host(name="b", port=22)),
        slurm={"nodes": 4, "options": ["--account=x"]},
        ports=PortRange(40000, 41000),
        runtime=Runtime(strategy=Strategy.NONE, bucket_mb=1, sync_seconds=0.5),
        progress_timeout_s=30.0,
        origins={"tasks.worker": "c.yaml:3:4"},
    )


def test_it_comes_back_equal(paths: RunPaths) -> None:
    state = paths.root.parent.parent
    write_job_input(paths, full(), {}, state)
    given = read_job_input(paths)
    assert given.description == full()
    assert given.state == state


def test_secrets_travel_in_files_that_only_their_owner_reads(paths: RunPaths) -> None:
    secrets = {"KEY": Secret(env="MINE"), "OTHER": Secret(file=Path("/home/a/.key"))}
    description = replace(full(), secrets=secrets)
    write_job_input(paths, description, {"MINE": "hunter2", "PATH": "/bin"}, paths.root)
    given = read_job_input(paths).description.secrets
    assert given["OTHER"] == secrets["OTHER"]
    file = given["KEY"].file
    assert file is not None
    assert file.read_text() == "hunter2\n"
    holders = [p for p in paths.root.rglob("*") if p.is_file()]
    assert [p for p in holders if b"hunter2" in p.read_bytes()] == [file]
    assert {stat.S_IMODE(p.stat().st_mode) for p in holders} == {0o600}
    forget_secrets(paths)
    assert [p for p in paths.root.rglob("*") if p.is_file()] == []


def test_a_folder_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        read_job_input(RunPaths(tmp_path / "runs" / "gone"))
    assert caught.value.hint is not None
    assert "TFCLUSTER_STATE_DIR" in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new"), [('"grace_s": 10.0', '"grace_s": "x"'), ('"backend"', '"b"')]
)
def test_damage_is_noticed(paths: RunPaths, old: str, new: str) -> None:
    write_job_input(paths, full(), {}, paths.root)
    file = paths.root / "job-input.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(StartError, match="damaged"):
        read_job_input(paths)

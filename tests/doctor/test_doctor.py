"""The ``doctor`` command, run on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.json_formats import assert_format
from tfcluster.doctor.probe import connect, files, packages


def doctor(
    folder: Path, config: str, *words: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    (folder / "c.yaml").write_text(config)
    return subprocess.run(
        [sys.executable, "-m", "tfcluster", "doctor", "c.yaml", "--quick", *words],
        cwd=folder,
        env={
            **os.environ,
            "TFCLUSTER_STATE_DIR": str(folder / "state"),
            **(environ or {}),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_healthy_machine_exits_with_0(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import keras")
    done = doctor(tmp_path, "command: python train.py\ntasks: {worker: 2}", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert_format("doctor", found)
    (host,) = found["hosts"]
    assert host["facts"]["files"] == {str(tmp_path): True, "train.py": True}
    assert host["facts"]["packages"] == packages()


def test_a_missing_script_gets_4_and_a_line(tmp_path: Path) -> None:
    done = doctor(tmp_path, "command: python trian.py\ntasks: {worker: 2}")
    assert done.returncode == 4
    assert f"localhost: error: there is no {tmp_path}/trian.py" in done.stderr
    assert "Traceback" not in done.stderr


OUTSIDE = {
    "slurm": ("sbatch", "Slurm", ""),
    "sge": ("qsub", "Grid Engine", "sge: {parallel_environment: tf}\n"),
}


@pytest.mark.parametrize("backend", OUTSIDE)
def test_outside_of_a_job_the_host_that_would_submit_it_is_looked_at(
    tmp_path: Path, backend: str
) -> None:
    program, name, section = OUTSIDE[backend]
    config = (
        f"backend: {backend}\n{section}command: python train.py\ntasks: {{worker: 2}}\n"
    )
    (tmp_path / program).write_text("#!/bin/sh\n")
    (tmp_path / program).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    missing = doctor(tmp_path, config, environ=path)
    assert missing.returncode == 4
    assert f"error: there is no {tmp_path}/train.py" in missing.stderr
    (tmp_path / "train.py").write_text("import keras")
    well = doctor(tmp_path, config, environ=path)
    assert well.returncode == 0, well.stderr
    assert "no problems found" in well.stderr
    assert f"not inside a job of {name}" in well.stderr
    (tmp_path / program).unlink()
    bare = doctor(tmp_path, config, environ={"PATH": str(tmp_path)})
    assert bare.returncode == 4
    assert f"there is no {program} on the PATH" in bare.stderr


def test_a_held_port_answers_though_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert connect("127.0.0.1", port) == "reached"
        held.listen()
        assert connect("127.0.0.1", port) == "reached"


def test_an_address_without_a_route_is_no_answer() -> None:
    assert connect("256.0.0.1", 1) != "reached"


def test_files_are_looked_for_in_the_workdir(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    assert files(str(tmp_path), ["a.py", "b.py"]) == {
        str(tmp_path): True,
        "a.py": True,
        "b.py": False,
    }

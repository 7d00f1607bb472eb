"""Which kept interpreters fit: comparisons of environments and process attributes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tfcluster.agent.kept.fitness import Wanted, misfit, program
from tfcluster.agent.kept.process_attributes import (
    ProcessAttributes,
    attributes_of,
    obstacle,
)
from tfcluster.import_variables import difference, is_import_variable, relative_folder
from tfcluster.isolated_import import module_argv

ARGV = module_argv((sys.executable,), "tfcluster.runtime.warm.preloader")
ENV = {"PATH": "/bin", "HOME": "/home/a", "OMP_NUM_THREADS": "2"}


def about(**changes: Any) -> dict[str, Any]:
    known = {
        "type": "about",
        "pid": os.getpid(),
        "argv": [*ARGV[:-1], "tfcluster.runtime.warm.kept"],
        "program": program(ARGV[0], ENV),
        "env": ENV,
    }
    return {**known, **changes}


def wanted(*, sure: bool = True, **changes: str) -> Wanted:
    env = {os.fsencode(k): os.fsencode(v) for k, v in {**ENV, **changes}.items()}
    return Wanted(ARGV, env, sure=sure)


def test_the_same_start_fits() -> None:
    assert misfit(about(), wanted()) is None
    assert misfit(about(), wanted(PWD="/x", CUDA_VISIBLE_DEVICES="1")) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"OMP_NUM_THREADS": "4"},
            "it was started with another value of OMP_NUM_THREADS",
        ),
        (
            {"TF_VAR_password": "secret"},
            "it was started without TF_VAR_password, which is set now",
        ),
        (
            {"SLURM_JOB_ID": "7"},
            "it was started without SLURM_JOB_ID, which is set now",
        ),
        ({"PYTHONPATH": "/a:lib"}, "PYTHONPATH contains a relative folder"),
        ({"LD_LIBRARY_PATH": "/a:"}, "LD_LIBRARY_PATH contains a relative folder"),
    ],
)
def test_another_environment_does_not_fit(
    changes: Mapping[str, str], reason: str
) -> None:
    assert misfit(about(), wanted(sure=True, **dict(changes))) == reason
    # Setup lines may still change it.
    assert misfit(about(), wanted(sure=False, **changes)) is None


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("TF_CONFIG", False),
        ("TF_CPP_MIN_LOG_LEVEL", True),
        ("CUDA_HOME", True),
        ("CUDA_VISIBLE_DEVICES", False),
        ("XLA_FLAGS", True),
        ("KERAS_BACKEND", True),
        ("PYTHONHASHSEED", True),
        ("LD_PRELOAD", True),
        ("HOME", True),
        ("HOMEPAGE", False),
        ("PATH", False),
        ("WANDB_API_KEY", False),
        ("TFCLUSTER_RUN", False),
    ],
)
def test_variables_that_imports_read(name: str, matters: bool) -> None:
    assert is_import_variable(name) is matters
    assert (difference({name: "1"}, {}) is not None) is matters


def test_a_relative_folder_is_found() -> None:
    assert relative_folder({"PYTHONPATH": "/a:/b"}) is None
    assert relative_folder({}) is None
    assert relative_folder({"PYTHONPATH": ""}) is None
    assert relative_folder({"PYTHONPATH": ".:/b"}) == "PYTHONPATH"


def test_another_program_does_not_fit(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    reason = misfit(about(program=program(str(other), ENV)), wanted())
    assert reason == f"it runs {other}, this run uses {sys.executable}"
    before = program(sys.executable, ENV)
    assert before is not None
    changed = {**before, "stamps": [[0, 0, 0, 0], None]}
    reason = misfit(about(program=changed), wanted())
    assert reason == f"{sys.executable} has changed since it was started"
    reason = misfit(about(argv=["python", "-c", "other", "/x", "kept"]), wanted())
    assert reason == "it was started by another copy of tfcluster, or by a changed one"


def test_a_program_is_found_as_exec_does(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").write_text("")
    (tmp_path / "b" / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path}/a:{tmp_path}/b"}
    found = program("python", env)
    assert found is not None
    assert found["path"] == f"{tmp_path}/b/python"
    (tmp_path / "b" / "python").write_text("changed")
    assert program("python", env) != found
    assert program("nothing", env) is None
    assert program("./python", env) is None


@pytest.mark.parametrize(
    "told", [about(pid=1 << 30), {"type": "about"}, about(program=None), about(argv=3)]
)
def test_one_that_cannot_be_examined_does_not_fit(told: dict[str, Any]) -> None:
    reason = misfit(told, wanted())
    assert reason is not None
    assert reason.startswith("it cannot be examined: ")


def here(**changes: Any) -> ProcessAttributes:
    return ProcessAttributes(**{**vars(attributes_of(os.getpid())), **changes})


SOFT, HARD = here().limits[resource.RLIMIT_STACK]
STACK = (SOFT // 2 if SOFT > 0 else 1 << 20, HARD)


def test_a_process_of_ones_own_fits() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert obstacle(here(), attributes_of(process.pid)) is None
    finally:
        process.kill()
        process.wait()


LOGIN = "0::/user.slice/user-1000.slice/session-{}.scope"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"namespaces": {"net": "net:[1]"}}, "it is in another "),
        ({"root": "/chroot"}, "it has another root folder"),
        ({"rights": {**here().rights, "Groups": "7"}}, "it has other rights (Groups)"),
        ({"label": "confined"}, "it has the security label 'confined', not "),
        ({"groups": ("0::/job_7",)}, "it is in another control group"),
        (
            {"limits": dict.fromkeys(here().limits, (1, 1))},
            "one of its resource limits",
        ),
        ({"nice": 19}, "its nice value is 19, not "),
        ({"oom_score_adj": 1000}, "its oom_score_adj is 1000, not "),
        ({"policy": 3}, "it has another scheduling policy"),
        ({"cpus": frozenset({999})}, "it may use other CPUs than this run (1, not "),
        ({"memory": "interleave:0-1"}, "it has another NUMA policy"),
        ({"personality": "00040000"}, "it has another execution domain"),
        (
            {"limits": {**here().limits, resource.RLIMIT_STACK: STACK}},
            "it was started with another limit of the stack's size",
        ),
    ],
)
def test_what_a_fork_would_inherit_must_be_equal(
    changes: dict[str, Any], reason: str
) -> None:
    found = obstacle(here(), here(**changes))
    assert found is not None
    assert found.startswith(reason)


def test_logins_of_one_user_share_it_but_jobs_do_not() -> None:
    first = here(groups=(LOGIN.format(1),))
    second = here(groups=(LOGIN.format(22),))
    job = here(groups=("0::/system.slice/slurmstepd.scope/job_1",))
    assert obstacle(first, second) is None
    assert obstacle(job, first) == "it is in another control group"

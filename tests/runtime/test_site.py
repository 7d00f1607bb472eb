"""What every Python process below a task imports first: it is cheap and harmless."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfcluster.base.isolated_import import HOOK_FOLDER, PACKAGE_ROOT
from tfcluster.runtime.context import context_from
from tfcluster.runtime.scripts.analysis import NAMES
from tfcluster.runtime.task.injection import common_seed

TASK = {
    "TFCLUSTER_STRATEGY": "collective",
    "TFCLUSTER_TASK": "worker:1",
    "TFCLUSTER_RANK": "1",
    "TFCLUSTER_SIZE": "2",
    "TFCLUSTER_ATTEMPT": "3",
    "TFCLUSTER_TOKEN": "00ff",
}


def python(
    code: str, *options: str, env: dict[str, str] | None = None, exe: str = ""
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFCLUSTER_")}
    path = f"{PACKAGE_ROOT}/{HOOK_FOLDER}"
    return subprocess.run(
        [exe or sys.executable, *options, "-c", code],
        env={**kept, "PYTHONPATH": path, **TASK, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_python_that_needs_nothing_of_it_pays_nothing() -> None:
    shown = python("import sys; print(sorted(sys.modules))").stdout
    plain = python(
        "import sys; print(sorted(sys.modules))", env={"TFCLUSTER_STRATEGY": "none"}
    ).stdout
    assert shown == plain
    assert "tfcluster" not in shown


@pytest.mark.parametrize(
    "env",
    [
        TASK,
        {"TFCLUSTER_STRATEGY": "parameter_server"},
        {
            "TFCLUSTER_STRATEGY": "parameter_server",
            "TFCLUSTER_RUNTIME": '{"synchronous":true}',
        },
        {"TFCLUSTER_RECORDING": '{"folder": "/x", "steps": 3, "seed": 12}'},
    ],
    ids=["in step", "by themselves", "synchronous", "recorded"],
)
def test_all_ranks_draw_the_same_numbers(env: dict[str, str]) -> None:
    seed = common_seed(context_from({**TASK, **env}))
    code = f"import random; a = random.random(); random.seed({seed}); "
    done = python(code + "print(a == random.random())", env=env)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("word", [*NAMES, "horovod"])
def test_self_distributing_programs_are_not_seeded(word: str) -> None:
    seed = common_seed(context_from(TASK))
    code = f"import random; a = random.random(); random.seed({seed}); "
    done = python(code + f"print(a == random.random())  # {word}")
    assert done.stdout == "False\n", done.stderr


def test_our_package_is_found_wherever_python_finds_its_own() -> None:
    done = python("import tfcluster.runtime as tfc; print(tfc.__file__)", "-s")
    assert done.stdout.strip().startswith(PACKAGE_ROOT), done.stderr


OLD = sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python"))


@pytest.mark.skipif(not OLD, reason="there is no Python older than 3.10 here")
def test_old_pythons_are_warned_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("print('imported')")
    code = f"import sys, random; sys.path.append({str(tmp_path)!r}); import keras"
    for exe in OLD:
        done = python(code, exe=str(exe))
        assert done.stdout == "imported\n", done.stderr
        assert "the training runtime needs 3.10" in done.stderr

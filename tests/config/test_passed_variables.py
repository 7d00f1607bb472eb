"""Variables that are passed on: ``-x`` and ``env: {pass: [...]}``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, problems, write
from tfcluster.base.errors import ConfigError
from tfcluster.config import Loaded, load
from tfcluster.plan.model import Secret

ENVIRON = {"PROJECT": "a $b ${c}", "WANDB_API_KEY": "very-secret", "pass": "word"}


def _loaded(tmp_path: Path, content: str, *flags: str) -> Loaded:
    path = write(tmp_path, content)
    return load(path, environ=ENVIRON, passed=flags)


def test_a_list_below_pass_has_names_and_their_values_come_from_here(
    tmp_path: Path,
) -> None:
    content = SMALLEST + "env: {A: 1, pass: [PROJECT, WANDB_API_KEY]}\n"
    loaded = _loaded(tmp_path, content)
    description = loaded.description
    assert description.env == {"A": "1", "PROJECT": "a $b ${c}"}
    assert description.secrets == {"WANDB_API_KEY": Secret(env="WANDB_API_KEY")}
    assert loaded.warnings == ()
    assert "very-secret" not in repr(description)
    assert description.origins["env.PROJECT"].endswith("cluster.yaml:3:20")


def test_a_variable_that_is_called_pass(tmp_path: Path) -> None:
    """A plain value keeps its meaning, and a list can name the variable."""
    plain = SMALLEST + "env: {pass: 7}\n"
    assert _loaded(tmp_path, plain).description.env == {"pass": "7"}
    named = SMALLEST + "env: {pass: [pass]}\n"
    assert _loaded(tmp_path, named).description.env == {"pass": "word"}
    assert _loaded(tmp_path, plain, "pass").description.env == {"pass": "word"}


def test_a_flag_replaces_what_the_file_says(tmp_path: Path) -> None:
    content = (
        "command: a\nenv: {A: 1, B: 1}\nsecrets: {PROJECT: {env: pass}}\n"
        "tasks: {worker: {env: {A: 2}}}\n"
    )
    description = _loaded(tmp_path, content, "A=$x=3", "PROJECT").description
    assert description.env == {"A": "$x=3", "B": "1", "PROJECT": "a $b ${c}"}
    assert description.secrets == {}
    assert description.tasks["worker"].env == {}
    assert description.origins["env.A"] == "-x A"


def test_variables_of_one_task_type(tmp_path: Path) -> None:
    content = "command: a\ntasks: {worker: {env: {pass: [PROJECT]}}}\n"
    description = _loaded(tmp_path, content).description
    assert description.env == {}
    assert description.tasks["worker"].env == {"PROJECT": "a $b ${c}"}


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("MISSING", "MISSING is not set where tfcluster is started"),
        ("=1", "a name is missing"),
        ("1A=2", "'1A' is not the name of a variable"),
        ("TF_CONFIG=x", "TF_CONFIG is set by tfcluster"),
        ("API_KEY=x", "API_KEY looks like a secret, and others can read arguments"),
    ],
)
def test_bad_flags(flag: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _loaded(tmp_path, SMALLEST, flag)
    (problem,) = caught.value.problems
    assert problem.message == words
    assert problem.where == f"-x {flag.partition('=')[0]}"


@pytest.mark.parametrize(
    ("env", "column", "words"),
    [
        ("{pass: [MISSING]}", 14, "MISSING is not set where tfcluster is started"),
        ("{pass: [[A]]}", 14, "an item of 'pass' must be the name of a variable"),
        ("{A: 1, pass: [A]}", 20, "A is passed on, and has a value under 'env:'"),
        ("{pass: {A: 1}}", 13, "'pass' must be text"),
    ],
)
def test_bad_lists(env: str, column: int, words: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, f"env: {env}\n{SMALLEST}", environ=ENVIRON)
    assert problem.message.startswith(words)
    assert problem.where == f"cluster.yaml:1:{column}"

"""Tests of which programs are worth a warm interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.launcher.job import uses_tensorflow
from tfcluster.plan.compose import parse


def judge(folder: Path, *words: str) -> bool:
    return uses_tensorflow(parse(["python", *words], ("python",)), folder)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tensorflow as tf", True),
        ("from keras import layers", True),
        ("import tfcluster.runtime as tfc", True),
        ("print('hello')", False),
        ("import kerastuner_like", False),
        ("this is not Python (", False),
    ],
)
def test_a_script_is_judged_by_what_it_names(
    tmp_path: Path, source: str, expected: bool
) -> None:
    (tmp_path / "a.py").write_text(source)
    assert judge(tmp_path, "a.py") is expected


def test_modules_beside_the_script_count_too(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from lib import model")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "model.py").write_text("import lib.deep")
    (tmp_path / "lib" / "deep.py").write_text("import keras")
    assert judge(tmp_path, "a.py")
    (tmp_path / "lib" / "deep.py").write_text("import json, a")
    assert not judge(tmp_path, "a.py")


def test_code_and_modules(tmp_path: Path) -> None:
    assert judge(tmp_path, "-c", "import keras")
    assert not judge(tmp_path, "-c", "pass")
    assert judge(tmp_path, "-m", "somewhere.train")


def test_what_cannot_be_read_may_use_it(tmp_path: Path) -> None:
    assert judge(tmp_path, "missing.py")

"""Tests that missing commands are found before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.descriptions import describe, hosts
from tfcluster.base.errors import StartError
from tfcluster.launcher.preflight import require_commands
from tfcluster.plan.compose import compose
from tfcluster.plan.placement import place


def check(folder: Path, *command: str) -> None:
    import sys

    description = describe(
        {"worker": 2}, command=command, workdir=folder, python=(sys.executable,)
    )
    places = place(description, hosts(None))
    specs = compose(description, places, lambda _: False)
    require_commands(specs, {"PATH": "/bin"}, programs=True)


def test_what_is_there_passes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    check(tmp_path, "python", "train.py")
    check(tmp_path, "sh", "-c", "true")
    check(tmp_path, "python", "-m", "anything")


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        (("pyhton", "train.py"), "'pyhton'", "did you mean 'python'?"),
        (("train.py",), "'train.py'", "write `python train.py`"),
        (("python", "trian.py"), "no trian.py", "did you mean 'train.py'?"),
        (("python", "zzz.py"), "no zzz.py", "set 'workdir'"),
        (("./missing", "x"), "'./missing'", None),
    ],
)
def test_what_is_missing_is_named_with_a_hint(
    tmp_path: Path, command: tuple[str, ...], message: str, hint: str | None
) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(StartError, match=message) as caught:
        check(tmp_path, *command)
    assert caught.value.hint == hint

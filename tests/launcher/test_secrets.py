"""Tests that secrets come from private files or the environment.

All invalid sources are reported in one error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.base.errors import ConfigError
from tfcluster.launcher.preflight import read_secrets
from tfcluster.plan.model import Secret


def private(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_values_from_files_and_environment(tmp_path: Path) -> None:
    file = private(tmp_path / "key", b"s3cret\n")
    secrets = {"A": Secret(file=file), "B": Secret(env="TOKEN")}
    assert read_secrets(secrets, {}, {"TOKEN": "t"}) == {"A": "s3cret", "B": "t"}


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    secrets = {
        "OPEN": Secret(file=private(tmp_path / "open", b"x", 0o644)),
        "GONE": Secret(file=tmp_path / "gone"),
        "UNSET": Secret(env="NOPE"),
        "NUL": Secret(file=private(tmp_path / "nul", b"a\0b")),
        "LONG": Secret(file=private(tmp_path / "long", b"x" * 70_000)),
        "DIR": Secret(file=tmp_path),
    }
    with pytest.raises(ConfigError) as caught:
        read_secrets(secrets, {"secrets.OPEN": "c.yaml:4:2"}, {})
    said = [str(problem) for problem in caught.value.problems]
    assert len(said) == 6
    assert said[0].startswith("c.yaml:4:2: error: secret OPEN:")
    assert "chmod 600" in said[0]
    assert "$NOPE is not set" in said[2]

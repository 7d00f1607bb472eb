"""Runs the tests of the partition, which import TensorFlow, in processes of their own.

To run one directly, set TFCLUSTER_TESTS_IMPORT_TENSORFLOW=1 and call
``python -m pytest -n0 tests/runtime/partition/FILE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OWN_PROCESS

FOLDER = Path(__file__).parent / "partition"
LIMIT_S = 600


def _files() -> list[Path]:
    texts = {path: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
    return [path for path, text in texts.items() if "\ndef test_" in text]


@pytest.mark.tensorflow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("path", _files(), ids=lambda path: path.stem)
def test_of_partition(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", str(path)]
    done = subprocess.run(
        command,
        env={**os.environ, OWN_PROCESS: "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Runs the tests of the partition, which import TensorFlow, in processes of their own.

To run one directly, set TFCLUSTER_TESTS_IMPORT_TENSORFLOW=1 and call
``python -m pytest -n0 tests/runtime/partition/FILE``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ranks import Job, run_jobs

FOLDER = Path(__file__).parent / "partition"
LIMIT_S = 600
EXAMPLES = "TFCLUSTER_PARTITION_EXAMPLES"
"""Multiplies how many examples the files try."""
LONG = (
    *("compiled_fits", "loops_that_take_batches"),
    *("divided_optimizers", "divided_pipelines"),
)
RARE = ("boxes", "images", "lists", "random", "scatters", "sparse", "strings")
"""Families of ops that few models use, and draws, which many tests of models have."""
SLOW = (*LONG, *(f"rules_{family}" for family in RARE))
EXHAUSTIVE = ("op_coverage", "op_coverage_layers")


def _files() -> list[Any]:
    texts = {path: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
    files = [path for path, text in texts.items() if "\ndef test_" in text]
    return [pytest.param(path, id=path.stem, marks=_marks(path.stem)) for path in files]


def _marks(stem: str) -> list[pytest.MarkDecorator]:
    if stem in EXHAUSTIVE:
        return [pytest.mark.exhaustive]
    return [pytest.mark.slow] if stem in SLOW else []


@pytest.mark.tensorflow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("path", _files())
def test_of_partition(path: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name == EXAMPLES}
    job = Job("tests", 1, "pytest_file.py", (str(path),), env)
    done = run_jobs(tmp_path, [job], LIMIT_S)["tests"]
    assert done.exit_codes == [0], done.outputs[0]

"""The error of a program with a constant batch size names the cause and the line."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.runtime.ranks import PROGRAMS, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(180)]

SCRIPT = "constant_batches.py"
TRAININGS = [
    "batch_shape",
    "constant_batch_in_a_step",
    "constant_batch_in_an_eager_step",
    "constant_batch_in_a_loop",
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    # If a job has not ended after this time, one of its ranks hangs.
    return Jobs(
        tmp_path_factory.mktemp("constant"),
        [Job(name, 2, SCRIPT, (name,)) for name in TRAININGS],
        timeout_s=90,
    )


@pytest.mark.parametrize("name", TRAININGS)
def test_what_fails_on_a_part_of_a_batch_says_so(
    jobs: Mapping[str, Ranks], name: str
) -> None:
    ranks = jobs[name]
    told = [
        code == 1
        and "this fails on a part of a batch" in output
        and re.search(re.escape(str(PROGRAMS / SCRIPT)) + r":\d+", output) is not None
        and "Use tf.shape(x)[0] instead" in output
        for code, output in zip(ranks.exit_codes, ranks.outputs, strict=True)
    ]
    assert any(told), ranks

"""Optimizers whose updates are applied by ps tasks that do not know their classes."""

from __future__ import annotations

import pytest

from tests.kit.ranks import Job, run_jobs

TIMEOUT_S = 300.0
NAMES = (
    "sgd",
    "momentum",
    "adam with a schedule",
    "adamw, averages",
    "rmsprop, clipnorm",
    "adagrad, clipvalue",
    "nadam, global clipnorm",
    "adafactor",
    "ftrl",
    "lion, accumulation",
    "a user's own",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ps")
    job = Job("optimizers", 1, "ps_optimizers.py", servers=2)
    ranks = run_jobs(folder, [job], TIMEOUT_S)["optimizers"]
    assert ranks.exit_codes == [0], ranks.outputs[0]
    lines = (line.partition(": ") for line in ranks.outputs[0].splitlines())
    return {name: rest for name, _, rest in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_ps_does_what_the_optimizer_does(said: dict[str, str], name: str) -> None:
    assert float(said[name]) < 2e-6, said[name]

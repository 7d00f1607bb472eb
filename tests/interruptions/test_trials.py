"""Some interruptions in every run of the tests; ``python -m tests.interruptions``: 200.

TFCLUSTER_CHAOS_TRIALS and TFCLUSTER_CHAOS_SEED choose others. A failed test names its
interruption.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.interruptions.trial import (
    IDIOMS,
    MORE_IDIOMS,
    Interruption,
    drawn,
    run,
)
from tests.launch.chaos import seeds
from tests.launch.cluster import Cluster

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]


def passes(chosen: Interruption, folder: Path) -> None:
    cluster = Cluster(folder)
    try:
        problems = run(cluster, chosen)
        assert not problems, f"{chosen}: {problems}"
    finally:
        cluster.end()


@pytest.mark.parametrize(
    ("idiom", "number", "whom"),
    [
        ("except", signal.SIGINT, "launcher"),
        ("handler", signal.SIGTERM, "worker:1"),
    ],
)
def test_saved_once(
    tmp_path: Path, idiom: str, number: signal.Signals, whom: str
) -> None:
    passes(Interruption(idiom, number, whom, "step 5\n", "worker:0", 0.0), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("idiom", [*IDIOMS, *MORE_IDIOMS])
def test_saved_once_by_every_idiom(tmp_path: Path, idiom: str) -> None:
    passes(drawn(7, idiom), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", seeds(40))
def test_saved_once_at_random_times(tmp_path: Path, seed: int) -> None:
    passes(drawn(seed), tmp_path)

"""Some interruptions in every run of the tests; ``python -m tests.interruptions``: 200.

TFCLUSTER_CHAOS_TRIALS and TFCLUSTER_CHAOS_SEED choose others. A failed test names its
interruption.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.interruptions.trial import (
    DEADLINE_S,
    IDIOMS,
    MORE_IDIOMS,
    Interruption,
    drawn,
    run,
)
from tests.kit.cluster import Cluster
from tests.rigs.chaos.plan import seeds

PROGRAMS = Path(__file__).parents[1] / "runtime" / "programs"
BACKED_UP = PROGRAMS / "backed_up.py"
SETS = PROGRAMS / "interrupted_sets.py"

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]


def passes(chosen: Interruption, folder: Path, strategy: str = "collective") -> None:
    cluster = Cluster(folder)
    try:
        problems = run(cluster, chosen, strategy=strategy)
        assert not problems, f"{chosen}: {problems}"
    finally:
        cluster.end()


@pytest.mark.parametrize(
    ("idiom", "number", "whom"),
    [
        pytest.param("except", signal.SIGINT, "launcher", marks=pytest.mark.slow),
        ("handler", signal.SIGTERM, "worker:1"),
    ],
)
def test_saved_once(
    tmp_path: Path, idiom: str, number: signal.Signals, whom: str
) -> None:
    passes(Interruption(idiom, number, whom, "step 5\n", "worker:0", 0.0), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "idiom",
    [
        *IDIOMS,
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE_IDIOMS),
    ],
)
def test_saved_once_by_every_idiom(tmp_path: Path, idiom: str) -> None:
    passes(drawn(7, idiom), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parameter_server", "replicated"])
def test_saved_once_with_parameter_servers(tmp_path: Path, strategy: str) -> None:
    chosen = Interruption(
        "except", signal.SIGTERM, "worker:1", "step 5\n", "worker:0", 0.0
    )
    passes(chosen, tmp_path, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "whom", ["launcher", pytest.param("worker:1", marks=pytest.mark.exhaustive)]
)
def test_process_sets(tmp_path: Path, whom: str) -> None:
    tasks = [f"worker:{rank}" for rank in range(3)]
    cluster = Cluster(tmp_path)
    try:
        running = cluster.start(
            "-n", "3", "--set", "grace=30s", "--", sys.executable, str(SETS)
        )
        running.wait_for_text("step 20\n", *tasks, timeout_s=DEADLINE_S)
        if whom == "launcher":
            running.signal(signal.SIGINT)
        else:
            pid = running.wait_for("task", task=whom, state="running")["pid"]
            os.kill(pid, signal.SIGINT)
        assert running.end(DEADLINE_S) in (0, 130), running.err
        found = [running.text(task).partition("handled at step ")[2] for task in tasks]
        # The third rank is in no set with the others, and may be at another step.
        assert found[0] == found[1]
        assert "" not in found
    finally:
        cluster.end()


@pytest.mark.slow
def test_a_backup_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def ended(folder: Path, interrupt_after: str = "") -> str:
        cluster = Cluster(folder)
        try:
            running = cluster.start("-n", "2", "--", sys.executable, str(BACKED_UP))
            if interrupt_after:
                running.wait_for_text(interrupt_after, "worker:0", timeout_s=DEADLINE_S)
                running.signal(signal.SIGINT)
            assert running.end(DEADLINE_S) == (130 if interrupt_after else 0)
            return running.text("worker:1")
        finally:
            cluster.end()

    (tmp_path / "whole").mkdir()
    whole = ended(tmp_path / "whole")
    (tmp_path / "interrupted").mkdir()
    assert "RESULT" not in ended(tmp_path / "interrupted", "epoch 3\nstep 25\n")
    rest = ended(tmp_path / "interrupted")
    assert "epoch 2\n" not in rest
    assert rest.partition("RESULT")[2] == whole.partition("RESULT")[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", seeds(40))
def test_saved_once_at_random_times(tmp_path: Path, seed: int) -> None:
    passes(drawn(seed), tmp_path)

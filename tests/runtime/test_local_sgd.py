"""``strategy: local_sgd``: ranks train by themselves and average their weights."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.ranks import Job, Jobs
from tests.kit.written import Values, Written

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]


COMPARED = ("embedding", "functions", "states")
MORE = ("batch_normalization", *COMPARED)
OF_INTERVALS = ("fit", "looked_at", "validated")
MORE_OF_INTERVALS = (
    "tape_eager",
    "tape_graph",
    "embedding",
    "mixed_precision",
    "drift",
)
"""Those with MORE are cases of slow tests, in jobs of their own."""
STEPS = 3
"""Steps between averagings, in the jobs that do not average after every step."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("local-sgd")

    def job(name: str, strategy: str, options: Any, *cases: str) -> Job:
        env = {
            "TFCLUSTER_STRATEGY": strategy,
            "TFCLUSTER_RUNTIME": json.dumps(options),
        }
        args = (str(folder / name), *cases)
        return Job(name, 2, "local_sgd.py", args, env)

    jobs = [
        job("collective", "collective", {}, "fit"),
        job("intervals", "local_sgd", {"sync_every": STEPS}, *OF_INTERVALS),
        job("more-collective", "collective", {}, *MORE),
        job("more-every-step", "local_sgd", {"sync_every": 1}, *MORE),
        job("more-intervals", "local_sgd", {"sync_every": STEPS}, *MORE_OF_INTERVALS),
        job("gradients-sent", "collective", {}, "many_weights"),
        job("weights-sent", "local_sgd", {"sync_every": STEPS}, "many_weights"),
        job("seconds", "local_sgd", {"sync_seconds": 0.05}, "fit"),
    ]
    return Written(folder, Jobs(folder, jobs, timeout_s=500))


def assert_alike(ranks: list[Values], *keys: str) -> None:
    for other in ranks[1:]:
        for key in keys or ranks[0]:
            np.testing.assert_array_equal(other[key], ranks[0][key], err_msg=key)


def differ(ranks: list[NDArray[Any]]) -> bool:
    return all(np.abs(other - ranks[0]).max() > 1e-6 for other in ranks[1:])


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPARED)
def test_averaged_after_every_step_it_is_collective_training(
    found: Written, case: str
) -> None:
    local, collective = (
        found.of(f"more-{job}", case) for job in ("every-step", "collective")
    )
    assert_alike(local)
    assert local[0].keys() == collective[0].keys()
    for key, value in collective[0].items():
        limit = 1e-6 * np.abs(value).max()
        np.testing.assert_allclose(
            local[0][key], value, rtol=0, atol=limit, err_msg=key
        )


def test_ranks_go_their_own_ways_until_they_are_averaged(found: Written) -> None:
    ranks = found.of("intervals", "fit")
    assert_alike(ranks, "after")
    for step in range(12):
        weights = [values["steps"][step] for values in ranks]
        if (step + 1) % 4 == 0:
            # At the end of an epoch weights are averaged before callbacks see them.
            # These were kept after the epoch's last step, so before that.
            assert differ(weights)
        elif (step % 4 + 1) % STEPS == 0:
            assert_alike([{"weights": each} for each in weights])
        else:
            assert differ(weights)


def test_the_mean_is_weighted_by_rows(found: Written) -> None:
    # After one step of plain SGD from the same weights, the mean of the replicas,
    # weighted by rows, equals one machine's step. Ranks have 7 and 8 of 15 rows.
    ranks = found.of("intervals", "fit")
    first = [values["steps"][0] for values in ranks]
    rows = np.array([7, 8]) / 15
    mean = sum(share * weights for share, weights in zip(rows, first, strict=True))
    (one, *_) = found.of("collective", "fit")
    np.testing.assert_allclose(mean, one["steps"][0], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_bytes_fall_by_the_interval(found: Written) -> None:
    (every, *_), (seldom, *_) = (
        found.of(job, "many_weights") for job in ("gradients-sent", "weights-sent")
    )
    # 96 steps, and one copy of the weights when fit begins. A number takes 28 to 32
    # bits, by what the ranks found faster.
    assert every["sent"] > 96 * 500_000 * 28 / 32
    assert every["sent"] / seldom["sent"] == pytest.approx(STEPS, rel=32 / 28 - 1)


def test_weights_are_averaged_before_they_are_looked_at(found: Written) -> None:
    ranks = found.of("intervals", "looked_at")
    assert_alike(ranks, "checkpoint", "at_end", "loss", "evaluated", "saved")
    assert differ([values["apart"] for values in ranks])
    for values in ranks:
        np.testing.assert_array_equal(values["saved"], values["after_saving"])


def test_validation_is_of_the_average(found: Written) -> None:
    ranks = found.of("intervals", "validated")
    assert len(ranks[0]["seen"]) == 2
    assert_alike(ranks)


@pytest.mark.slow
def test_batches_are_normalised_over_own_rows(found: Written) -> None:
    local = found.of("more-every-step", "batch_normalization")
    (collective, *_) = found.of("more-collective", "batch_normalization")
    assert_alike(local)
    for key, value in collective.items():
        assert not np.array_equal(local[0][key], value)
        limit = 0.6 * np.abs(value).max()
        np.testing.assert_allclose(local[0][key], value, rtol=0, atol=limit)


@pytest.mark.slow
def test_loops_are_averaged_on_the_way_and_at_the_end_of_a_pass(found: Written) -> None:
    ranks = found.of("more-intervals", "tape_graph")
    # Ten batches and the end of each pass.
    for place, apart in [(1, True), (2, False), (3, True), (9, True), (10, False)]:
        weights = [values["steps"][place] for values in ranks]
        assert differ(weights) == apart, place
    assert_alike(ranks, "other")
    assert differ([values["steps"][11] for values in ranks])


@pytest.mark.slow
def test_eager_steps_are_computed_whole_and_reported(found: Written) -> None:
    assert_alike(found.of("more-intervals", "tape_eager"))
    chief, *_ = found.jobs["more-intervals"].outputs
    assert chief.count("a training step runs eagerly") == 1


@pytest.mark.slow
def test_sparse_gradients_and_ranks_without_rows(found: Written) -> None:
    ranks = found.of("more-intervals", "embedding")
    assert_alike(ranks)
    losses = ranks[0]["history_loss"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_mixed_precision_trains(found: Written) -> None:
    ranks = found.of("more-intervals", "mixed_precision")
    assert_alike(ranks)
    assert str(ranks[0]["scaled"]) == "loss_scale_optimizer"
    assert ranks[0]["history_loss"][-1] < ranks[0]["history_loss"][0]


@pytest.mark.slow
def test_replicas_that_drift_are_reported_once(found: Written) -> None:
    chief, *others = found.jobs["more-intervals"].outputs
    assert chief.count("the replicas drift: after") == 1
    assert "%" in chief.partition("the replicas drift")[2].partition("\n")[0]
    assert not any("drift:" in output for output in others)


@pytest.mark.slow
def test_seconds_are_as_many_steps_on_all_ranks(found: Written) -> None:
    ranks = found.of("seconds", "fit")
    assert_alike(ranks, "after")

"""Optimizers of whose variables each rank holds a piece: ``runtime.shard_optimizer``.

A job runs when a test first needs its results.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.kit.ranks import Job, Jobs
from tests.runtime.keras_checks import MARKS, assert_equal_on_all_ranks
from tests.runtime.keras_jobs import LIMIT_S, STRICT, Values

pytestmark = MARKS

ALIKE = {
    "first": (2, ["trained"]),
    "others": (2, ["read_in_callbacks", "assigned", "two_optimizers", "compiled"]),
    "uneven": (3, ["trained", "saved"]),
    "abc": (3, ["trained"]),
    "abab": (4, ["trained"]),
}
"""The number of ranks, and deeds that end with the same bits, divided or not.

The names of the last two say on which host each rank is.
"""


def environment(**options: object) -> dict[str, str]:
    return {**STRICT, "TFCLUSTER_RUNTIME": json.dumps(options)}


THEMES = {
    "optimizers": [
        *("clipped", "clipnorm", "others", "mixed_bfloat16", "weight_decay"),
        *("averaged_weights", "accumulated", "mixed_precision"),
    ],
    "loops": [
        *("gan", "two_optimizers", "tape_graph", "tape_in_one_function"),
        *("on_batch", "several_batches_in_a_step", "tape_takes_batches"),
    ],
    "callbacks": [
        *("restored", "goes_on_from_a_checkpoint", "goes_on_from_a_model"),
        *("slots_assigned", "backed_up", "averages_swapped_in"),
    ],
}
"""Cases of ``programs/cases`` that end with the same bits, divided or not."""
NEARLY = ("accumulated/",)
"""The beginnings of the names of what may differ in its last bits; see training.md."""


@dataclass(frozen=True)
class Deeds:
    """What the ranks of all jobs have returned."""

    folder: Path
    jobs: Jobs

    def of(self, name: str, size: int) -> list[dict[str, Any]]:
        """The results of the ranks of a job."""
        assert self.jobs[name]
        return [
            dict(np.load(self.folder / f"{name}-{rank}.npz")) for rank in range(size)
        ]


@pytest.fixture(scope="module")
def deeds(tmp_path_factory: pytest.TempPathFactory) -> Deeds:
    folder = tmp_path_factory.mktemp("shard_optimizer")
    divided = environment(shard_optimizer=True)
    by_ops = environment(shard_optimizer=True, transport="tensorflow")
    chosen = [
        ("another_thread", 2, ["another_thread"], divided),
        ("one_rank_reads", 2, ["one_rank_reads"], divided),
        ("by_ops", 2, ["trained"], by_ops | {"TF_GRPC_REUSE_PORT": "1"}),
    ]
    for name, (size, words) in ALIKE.items():
        hosts = {"HOSTS": name} if len(name) == size else {}
        chosen += [
            (f"whole-{name}", size, words, environment() | hosts),
            (f"divided-{name}", size, words, divided | hosts),
        ]
    jobs = [
        Job(name, size, "shard_optimizer.py", (str(folder / name), *words), env)
        for name, size, words, env in chosen
    ]
    return Deeds(folder, Jobs(folder, jobs, LIMIT_S, must_succeed=True))


def of_deed(ranks: list[dict[str, Any]], deed: str) -> list[Values]:
    """The results of one deed, but for the bytes that ranks hold."""
    return [
        {
            key: value
            for key, value in rank.items()
            if key.startswith(f"{deed}/") and key != "trained/bytes"
        }
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("name", "deed"),
    [
        pytest.param(name, deed, marks=[pytest.mark.slow] * (name != "first"))
        for name, (_, words) in ALIKE.items()
        for deed in words
    ],
)
def test_ranks_train_the_same_bits(deeds: Deeds, name: str, deed: str) -> None:
    size, _ = ALIKE[name]
    whole = of_deed(deeds.of(f"whole-{name}", size), deed)
    divided = of_deed(deeds.of(f"divided-{name}", size), deed)
    assert whole[0]
    assert_equal_on_all_ranks([whole[0], *divided])


@pytest.mark.parametrize(
    "name",
    ["first", *(pytest.param(k, marks=pytest.mark.slow) for k in ("uneven", "abc"))],
)
def test_a_rank_holds_its_piece_until_somebody_reads(deeds: Deeds, name: str) -> None:
    size, _ = ALIKE[name]
    for rank in deeds.of(f"divided-{name}", size):
        training, iterations_read, all_read = rank["trained/bytes"]
        # Small ones are whole, and the longest dimension may not be divisible.
        assert all_read / size <= training < all_read / size * 1.1
        assert iterations_read == training
    for rank in deeds.of(f"whole-{name}", size):
        assert len(set(rank["trained/bytes"])) == 1


@pytest.mark.slow
def test_training_goes_on_where_it_was_saved(deeds: Deeds) -> None:
    (rank, *_) = of_deed(deeds.of("divided-uneven", 3), "saved")
    states = {
        name: {k.rpartition("_")[2]: v for k, v in rank.items() if f"/{name}_" in k}
        for name in ("saved", "later", "restored", "again", "loaded", "resumed")
    }
    assert_equal_on_all_ranks([states["saved"], states["restored"]])
    for name in ("again", "loaded", "resumed"):
        assert_equal_on_all_ranks([states["later"], states[name]])


@pytest.mark.slow
def test_one_process_reads_whole_slots(deeds: Deeds) -> None:
    (rank, *_) = of_deed(deeds.of("divided-uneven", 3), "saved")
    found = of_file(deeds.jobs["divided-uneven"].folder / "saved" / "model.keras")
    for place, array in enumerate(found):
        np.testing.assert_array_equal(array, rank[f"saved/saved_s{place}"])
    assert sum(array.ndim == 2 for array in found) == 6


def of_file(path: Path) -> list[Any]:
    """The optimizer's variables in a saved model, in their order."""
    with zipfile.ZipFile(path) as saved:
        content = io.BytesIO(saved.read("model.weights.h5"))
    with h5py.File(content) as file:
        slots = file["optimizer/vars"]
        return [slots[str(place)][()] for place in range(len(slots))]


@pytest.mark.slow
def test_collective_ops_train_with_pieces(deeds: Deeds) -> None:
    ranks = deeds.of("by_ops", 2)
    assert_equal_on_all_ranks(of_deed(ranks, "trained"))
    for rank in ranks:
        training, _, all_read = rank["trained/bytes"]
        assert training < all_read * 0.55


@pytest.mark.slow
def test_another_thread_gets_an_error(deeds: Deeds) -> None:
    for rank in deeds.of("another_thread", 2):
        text = str(rank["another_thread/text"])
        assert "is used in another thread" in text
        assert "kernel" in text


@pytest.mark.slow
def test_a_rank_that_reads_alone_is_named(deeds: Deeds) -> None:
    for rank in deeds.of("one_rank_reads", 2):
        text = str(rank["one_rank_reads/text"])
        assert "rows of " in text
        assert "rank 1" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("theme", THEMES)
def test_cases_train_the_same_bits(tmp_path: Path, theme: str) -> None:
    jobs = []
    for name, divides in (("whole", False), ("divided", True)):
        words = (theme, str(tmp_path / name), *THEMES[theme])
        env = environment(shard_optimizer=divides)
        jobs.append(Job(name, 3, "cases_with_pieces.py", words, env))
    deeds = Deeds(tmp_path, Jobs(tmp_path, jobs, LIMIT_S, must_succeed=True))
    (whole, *_), divided = deeds.of("whole", 3), deeds.of("divided", 3)
    assert {key.partition("/")[0] for key in whole} == set(THEMES[theme])
    for name in [key for key in whole if key.startswith(NEARLY)]:
        values = [found.pop(name) for found in (whole, *divided)]
        for value in values[1:]:
            np.testing.assert_allclose(value, values[0], rtol=1e-6, atol=1e-6)
    assert_equal_on_all_ranks([whole, *divided])

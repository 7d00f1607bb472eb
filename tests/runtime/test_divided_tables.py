"""``runtime.shard_tables``: a table that is divided by rows trains as a whole one."""

from __future__ import annotations

import itertools
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.kit.ranks import Job, Jobs
from tests.runtime.keras_checks import assert_equal_on_all_ranks, assert_equal_to_one
from tests.runtime.keras_jobs import Values

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow, pytest.mark.timeout(500)]

CASES = {2: ("adam", "adagrad", "kernels"), 3: ("momentum", "compiled")}
"""By the number of ranks: an optimizer, or how it is trained, or what is divided."""
LIMIT = 16_000
"""Bytes: only tables, large kernels, and what optimizers have for them, are larger."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    env = {
        "TFCLUSTER_RUNTIME": json.dumps({"shard_tables": LIMIT}),
        "TFCLUSTER_PARTITION": "strict",
    }
    all_of_them = tuple(itertools.chain(*CASES.values()))
    jobs = [
        Job(
            f"on-{size}",
            size,
            "divided_tables.py",
            (str(folder / str(size)), *names),
            env if size > 1 else {},
        )
        for size, names in {1: all_of_them, **CASES}.items()
    ]
    ended = Jobs(folder, jobs, 400, must_succeed=True)
    assert all(ended[job.name] for job in jobs)
    return folder


@pytest.mark.parametrize(
    ("size", "optimizer"),
    [(size, name) for size, names in CASES.items() for name in names],
)
def test_ranks_train_what_one_process_does(
    folder: Path, size: int, optimizer: str
) -> None:
    ranks: list[Values] = [
        dict(np.load(folder / f"{size}.{optimizer}-{rank}.npz")) for rank in range(size)
    ]
    assert_equal_on_all_ranks(ranks)
    assert_equal_to_one(dict(np.load(folder / f"1.{optimizer}-0.npz")), ranks[0])


@pytest.mark.parametrize("size", CASES)
def test_a_saved_model_is_whole(folder: Path, size: int) -> None:
    """One process loads it: its file has the same entries, of the same shapes."""
    h5py = pytest.importorskip("h5py")
    optimizer, *_ = CASES[size]
    entries = []
    for number in (1, size):
        with zipfile.ZipFile(folder / f"{number}.{optimizer}.keras") as archive:
            path = archive.extract("model.weights.h5", folder / str(number))
        with h5py.File(path) as file:
            found: dict[str, np.ndarray] = {}
            file.visititems(
                lambda name, item, found=found: (
                    found.update({name: np.array(item)})
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
        entries.append(found)
    one, ranks = entries
    assert one.keys() == ranks.keys()
    for name, value in one.items():
        np.testing.assert_allclose(ranks[name], value, rtol=1e-4, atol=1e-5)

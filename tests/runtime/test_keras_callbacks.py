"""Ranks train the same as one process: ``programs/cases/callbacks.py``."""

from __future__ import annotations

import numpy as np

from tests.runtime.keras_checks import (
    MARKS,
    assert_equal_on_all_ranks,
    assert_equal_to_one,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, Outcomes, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("callbacks"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@at_each_size(["one_rank_stops"])
def test_training_ends_everywhere_when_one_rank_wants_to(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    assert int(compared.ranks[0]["batches"]) == 2


@at_each_size(["files"])
def test_only_the_chief_writes(compared: Compared) -> None:
    named = [
        {str(name) for name in found["written"] if not str(name).startswith("tmp")}
        for found in [compared.one, *compared.ranks]
    ]
    assert "best.keras" in named[0]
    assert named[1:] == [named[0], *[set()] * (compared.size - 1)]
    assert all(found["same"] for found in compared.ranks)
    header, *epochs = str(compared.ranks[1]["log"]).splitlines()
    assert header.startswith("epoch,accuracy,loss,val_")
    assert len(epochs) == 2


def test_weights_files_are_there_after_training(outcomes: Outcomes) -> None:
    folder = outcomes.folder_of("files") / "deep" / "er"
    assert {path.name for path in folder.iterdir()} == {
        "1.weights.h5",
        "2.weights.h5",
    }


@at_each_size(["checkpoints"])
def test_checkpoints_of_tensorflow_are_the_chiefs(compared: Compared) -> None:
    assert_equal_on_all_ranks([compared.one, *compared.ranks])
    assert compared.ranks[-1]["restored"]


@at_each_size(["written"])
def test_an_exported_model_serves_what_was_trained(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    assert_equal_to_one(compared.one, compared.ranks[0])
    last = compared.ranks[-1]
    np.testing.assert_allclose(last["served"], last["predicted"], rtol=1e-5)


def test_files_are_downloaded_once_on_a_host(outcomes: Outcomes) -> None:
    folder = outcomes.folder_of("downloads")
    requests = (folder / "requests.txt").read_text().splitlines()
    assert [request.rpartition("/")[2] for request in requests] == [
        "callbacks.py",
        "texts.zip",
    ]


def test_summaries_are_written_by_the_chief(outcomes: Outcomes) -> None:
    folder = outcomes.folder_of("summaries") / "figures"
    assert len(list(folder.iterdir())) == 1


@at_each_size(["unwritable"])
def test_an_error_while_saving_is_raised_on_all_ranks(compared: Compared) -> None:
    raised = str(compared.one["raised"])
    assert raised != "nothing"
    errors = [str(found["raised"]) for found in compared.ranks]
    assert errors == [raised] * compared.size

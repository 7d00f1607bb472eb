"""The verdict of a soak finds what is wrong, and only that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.rigs.soak import verdict

ALONE = [(epoch, 1.0 / (epoch + 1)) for epoch in range(5)]


@pytest.mark.parametrize(
    ("epochs", "interruptions", "words"),
    [
        ([0, 1, 2, 3, 4], 0, None),
        ([0, 1, 2, 2, 3, 4], 1, None),
        ([0, 1, 2, 2, 3, 4], 0, "were repeated"),
        ([0, 1, 2, 3], 0, "missing: [4]"),
        ([0, 1, 3, 4], 1, None),
        ([0, 3, 4], 1, "missing: [1, 2]"),
        ([0, 1, 2, 3, 4, 5], 0, "one too many"),
        ([0, 1, 2, 0, 1, 2, 3, 4], 1, "were repeated"),
    ],
)
def test_epochs(epochs: list[int], interruptions: int, words: str | None) -> None:
    found = [(epoch, 1.0 / (epoch + 1)) for epoch in epochs]
    wrong = list(verdict.of_epochs(found, ALONE, interruptions))
    assert bool(wrong) == (words is not None), wrong
    assert words is None or any(words in each for each in wrong), wrong


def test_another_loss_is_found() -> None:
    found = [*ALONE[:-1], (4, 0.3)]
    (wrong,) = verdict.of_epochs(found, ALONE, 0)
    assert "epoch 4 has the loss 0.3" in wrong


def test_a_line_that_was_cut_off_is_no_epoch(tmp_path: Path) -> None:
    path = tmp_path / "epochs.jsonl"
    path.write_text('{"epoch": 0, "loss": 1.0}\n{"epoch": 1, "lo')
    assert verdict.read_epochs(path) == [(0, 1.0)]


def test_the_last_bit_of_a_weight_counts(tmp_path: Path) -> None:
    weights = np.linspace(0, 1, 7, dtype=np.float32)
    other = weights.copy()
    other[3] = np.nextafter(other[3], np.float32(2))
    np.savez(tmp_path / "a.npz", w0=weights)
    np.savez(tmp_path / "b.npz", w0=weights)
    np.savez(tmp_path / "c.npz", w0=other)
    assert not list(verdict.of_weights(tmp_path / "a.npz", tmp_path / "b.npz"))
    (wrong,) = verdict.of_weights(tmp_path / "a.npz", tmp_path / "c.npz")
    assert wrong.startswith("w0 differs")

"""Compares a training that was disturbed with one that was not. Pure, but for reading.

docs/how-to/resume.md and docs/shards.md promise: all epochs, in their order; an epoch
that was interrupted is repeated from its beginning; the same bits in the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

Epoch = tuple[int, float]


def read_epochs(path: Path) -> list[Epoch]:
    """The completed epochs and their losses; a last line may be cut off by a kill."""
    found = []
    for line in path.read_text().splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        found.append((int(told["epoch"]), float(told["loss"])))
    return found


def of_epochs(
    disturbed: Sequence[Epoch], alone: Sequence[Epoch], interruptions: int
) -> Iterator[str]:
    """What is wrong with the epochs of the disturbed training."""
    wanted = dict(alone)
    missing = sorted(set(wanted) - {epoch for epoch, _ in disturbed})
    # A kill may come between the end of an epoch and the line about it.
    if len(missing) > interruptions:
        yield f"epochs are missing: {missing}"
    repeated = len(disturbed) - len({epoch for epoch, _ in disturbed})
    if repeated > interruptions:
        yield f"{repeated} epochs were repeated after {interruptions} interruptions"
    before = -1
    for epoch, loss in disturbed:
        if not before - 1 <= epoch - 1 <= before + interruptions:
            yield f"epoch {epoch} came after epoch {before}"
        before = epoch
        if epoch not in wanted:
            yield f"epoch {epoch} is one too many"
        elif not math.isclose(loss, wanted[epoch], rel_tol=1e-4, abs_tol=1e-6):
            yield f"epoch {epoch} has the loss {loss}, undisturbed {wanted[epoch]}"


def of_weights(disturbed: Path, alone: Path) -> Iterator[str]:
    """With ``runtime.shards``, the weights have the same bits."""
    with np.load(disturbed) as found, np.load(alone) as wanted:
        if sorted(found) != sorted(wanted):
            yield f"{sorted(found)} instead of {sorted(wanted)}"
            return
        for name in sorted(wanted):
            if found[name].tobytes() != wanted[name].tobytes():
                worst = float(np.abs(found[name] - wanted[name]).max())
                yield f"{name} differs by up to {worst:.3g}"

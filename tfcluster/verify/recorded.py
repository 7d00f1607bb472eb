"""What a task recorded of its training, as plain data: reads the recorder's files.

The recorder is ``runtime/keras/step_recorder.py``. numpy is imported on use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

EVENTS = "events.jsonl"
_NOTES = ("clip", "layers")


@dataclass(frozen=True, slots=True)
class Event:
    """The result of a step, of a batch or of an epoch."""

    kind: str
    """step | batch | epoch | evaluate | train_on_batch | test_on_batch"""
    of: int
    """The number of the optimizer or model, in the order of their first use."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """Losses and metrics by name; empty for a step."""
    file: Path | None = None
    names: Sequence[tuple[str, str]] = ()
    """Kind and name of each array in ``file``."""

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The arrays after a step, in the order of ``names``. Raises OSError."""
        import numpy as np

        if self.file is None:
            return []
        with np.load(self.file, allow_pickle=False) as found:
            return [found[f"arr_{index}"] for index in range(len(self.names))]


@dataclass(frozen=True, slots=True)
class Recorded:
    """All that a run recorded."""

    events: tuple[Event, ...]
    clips: tuple[str, ...]
    """Lines of the program that clip something outside of an optimizer."""
    layers: frozenset[str]
    """Classes of the layers of the models that were trained."""

    @property
    def steps(self) -> int:
        return sum(event.kind == "step" for event in self.events)


def read(folder: Path) -> Recorded:
    """What was recorded in ``folder``; nothing if the program trained nothing."""
    try:
        text = (folder / EVENTS).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    # A run that was stopped may have left half a line.
    lines = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
    return Recorded(
        events=tuple(
            _event(line, folder) for line in lines if line["kind"] not in _NOTES
        ),
        clips=tuple(line["line"] for line in lines if line["kind"] == "clip"),
        layers=frozenset(
            name
            for line in lines
            if line["kind"] == "layers"
            for name in line["layers"]
        ),
    )


def _event(line: Mapping[str, Any], folder: Path) -> Event:
    if line["kind"] == "step":
        return Event(
            kind="step",
            of=line["optimizer"],
            file=folder / line["file"],
            names=tuple((kind, name) for kind, name in line["names"]),
        )
    return Event(kind=line["kind"], of=line["model"], logs=line["logs"])

"""What a task recorded about its training, as plain data: reads the recorder's files.

The recorders are ``runtime/keras/step_recorder.py`` and
``runtime/tf1/step_recorder.py``. numpy is imported on use.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

EVENTS = "events.jsonl"
_RUN = "run"


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    kind: str
    """step | batch | epoch | evaluate | train_on_batch | test_on_batch | run"""
    after_steps: int
    """The number of steps that had been recorded before."""
    of: int
    """The number of the optimizer or model, in order of first use."""
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
        with np.load(self.file, allow_pickle=False) as arrays:
            return [arrays[f"arr_{index}"] for index in range(len(self.names))]


@dataclass(frozen=True, slots=True)
class Recorded:
    events: tuple[RecordedEvent, ...]
    """The events in order, without those in ``runs``."""
    runs: tuple[RecordedEvent, ...] = ()
    """The numbers that sessions of TensorFlow 1 returned. If workers wait for each
    other, updates are applied while a session runs, so they have a separate order."""
    clips: tuple[str, ...] = ()
    """The program's lines that clip something outside of an optimizer."""
    layers: frozenset[str] = frozenset()
    """The layer classes of the models that were trained."""
    methods: frozenset[str] = frozenset()
    """How a graph of TensorFlow 1 combines the gradients of workers: independent |
    sync_replicas | mean"""
    not_compared: tuple[str, ...] = ()
    """What could not be recorded, in words."""
    gpus: int = 0
    """The number of GPUs that TensorFlow saw."""
    tf32: bool = False
    """Whether products of float32 may have been computed in TF32."""
    unit: float = 0.0
    """The rounding error of its coarsest sums, relative to their size; 0: unknown."""

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
    events: list[RecordedEvent] = []
    runs: list[RecordedEvent] = []
    notes: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    steps = 0
    for line in lines:
        if line["kind"] == "step" or "logs" in line:
            event = _event(line, folder, steps)
            steps += event.kind == "step"
            (runs if event.kind == _RUN else events).append(event)
        else:
            notes[line["kind"]].append(line)
    return Recorded(
        events=tuple(events),
        runs=tuple(runs),
        clips=tuple(note["line"] for note in notes["clip"]),
        layers=frozenset(name for note in notes["layers"] for name in note["layers"]),
        methods=frozenset(note["method"] for note in notes["tf1"]),
        not_compared=tuple(note["what"] for note in notes["not_compared"]),
        gpus=max((note["gpus"] for note in notes["devices"]), default=0),
        tf32=any(note["tf32"] for note in notes["devices"]),
        unit=max((note["unit"] for note in notes["rounding"]), default=0.0),
    )


def _event(line: Mapping[str, Any], folder: Path, steps: int) -> RecordedEvent:
    if line["kind"] == "step":
        return RecordedEvent(
            kind="step",
            after_steps=steps,
            of=line["optimizer"],
            file=folder / line["file"],
            names=tuple((kind, name) for kind, name in line["names"]),
        )
    return RecordedEvent(line["kind"], steps, of=line["model"], logs=line["logs"])

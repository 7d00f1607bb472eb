"""The files of a recording, for ``tfcluster verify``.

The chief writes one line of ``events.jsonl`` for each event, and a separate file with
the arrays of each step; the other ranks only count their steps. After the last
requested step, a rank waits to be stopped.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tfcluster.runtime.context import Context, Recording
from tfcluster.runtime.tensor_types import Array


class RecordingFiles:
    """The files that this task writes for a recording. May be used by any thread."""

    def __init__(self, recording: Recording, context: Context) -> None:
        self._folder = Path(recording.folder)
        self._limit = recording.steps
        self.moved = recording.moved
        """Whether gradients are moved by about their rounding errors."""
        self.xla = recording.xla
        """Whether models are trained with XLA if the program asks for it."""
        self.writes = context.is_chief
        """Whether this task writes; if not, all methods except ``step`` do nothing."""
        self._rank, self._size = context.rank, context.size
        self._lock = threading.Lock()
        self._steps = 0
        self._optimizers: dict[int, tuple[int, object]] = {}
        self._notes: set[str] = set()

    def optimizer_number(self, optimizer: object) -> tuple[int, bool]:
        """The number of an optimizer, in order of first use, and whether it is new."""
        new = id(optimizer) not in self._optimizers
        if new:
            self._optimizers[id(optimizer)] = len(self._optimizers), optimizer
        return self._optimizers[id(optimizer)][0], new

    def step(
        self,
        optimizer: int,
        names: Sequence[Sequence[str]],
        arrays: Sequence[Array],
        *,
        ends_all: bool = False,
    ) -> None:
        """Record the arrays after a step; ``names`` has the kind and name of each.

        Does not return if all steps have been recorded. With ``ends_all``, the
        recording is then complete, whatever the other ranks do. Raises OSError.
        """
        with self._lock:
            done = self._limit is not None and self._steps >= self._limit
            if not done:
                self._steps += 1
                self._write(optimizer, names, arrays)
        if done:
            for rank in range(self._size) if ends_all else [self._rank]:
                (self._folder / f"done-{rank}").touch()
            threading.Event().wait()

    def event(self, event: Mapping[str, object]) -> None:
        """Record an event: a JSON object with its ``kind``. Raises OSError."""
        with self._lock:
            self._append(event)

    def note_once(self, event: Mapping[str, object]) -> None:
        """Record an event unless an equal one has been recorded. Raises OSError."""
        text = json.dumps(event)
        with self._lock:
            if text not in self._notes:
                self._notes.add(text)
                self._append(event)

    def _write(
        self, optimizer: int, names: Sequence[Sequence[str]], arrays: Sequence[Array]
    ) -> None:
        if not self.writes:
            return
        if self._steps == 1:
            self._append({"kind": "devices", **devices()})
        file = f"{self._steps:06d}.npz"
        with (self._folder / file).open("wb") as out:
            # Passed to numpy by position: names of variables need not be distinct.
            np.savez(out, *(_portable(array) for array in arrays))
        names = [list(words) for words in names]
        self._append(
            {"kind": "step", "optimizer": optimizer, "file": file, "names": names}
        )

    def _append(self, event: Mapping[str, object]) -> None:
        if self.writes:
            with (self._folder / "events.jsonl").open("a") as out:
                out.write(json.dumps(event) + "\n")


def devices() -> dict[str, object]:
    """The devices of TensorFlow, which is imported and has begun to compute."""
    import tensorflow as tf

    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    overridden = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    gpus = len(tf.config.get_visible_devices("GPU"))
    return {"gpus": gpus, "tf32": bool(tf32) and not overridden}


def _portable(array: Array) -> Array:
    """``array`` in a dtype that numpy can save; bfloat16 is not one."""
    array = np.asarray(array)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)

"""Only what training tasks warn of may explain a difference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tfcluster.commands.verify_trial import Trial
from tfcluster.record.run_status import RunView
from tfcluster.verify.recorded import Recorded


@dataclass
class Noted:
    notes: tuple[str, ...]


def test_notes_of_the_launcher_are_no_causes() -> None:
    notes = (
        "node1: swept 3 leftover processes",
        "stopping all tasks",
        "warning: running as root; your program will, too",
        "warning: ps:0: the program uses TensorFlow's server of this ps",
        "note: worker:0: the exchanges of 2 BatchNormalization layers take 20%",
        "warning: worker:1: the gradients do not match",
    )
    view = cast("RunView", Noted(notes))
    recorded = cast("Recorded", None)
    trial = Trial(recorded, view, True, Path(), "", Path("log"))
    assert trial.warnings == [notes[-1]]

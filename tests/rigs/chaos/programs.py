"""What the tasks of a trial run: a stub that costs nothing, or a real training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.rigs.chaos.faults import Blame
from tests.rigs.chaos.plan import STUB, Trial
from tests.rigs.testbed.layout import REPOSITORY

# Each task has a child that ignores TERM, a daemon, and a daemon's child. Its lines are
# numbered, so that a damaged log shows. It ends once the file named by its argument
# exists.
_STUB = """\
import os, signal, sys, time
def child(sessions, deaf):
    if os.fork():
        return
    for _ in range(sessions):
        os.setsid()
        if os.fork():
            os._exit(0)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    os._exit(0)
child(0, True)
child(1, False)
child(2, True)
print('up', flush=True)
number = 0
while not os.path.exists(sys.argv[1]) and number < 6000:
    print('line', number, flush=True)
    number += 1
    time.sleep(0.05)
print('done', number, flush=True)
"""

_EPOCHS_TO_THE_END = 8
_EPOCHS_FOR_EVER = 2000


def write(folder: Path, trial: Trial) -> dict[str, Any]:
    """Write the program; returns the part of the configuration that describes it."""
    if trial.program == STUB:
        (folder / "stub.py").write_text(_STUB)
        (folder / "stub.py").chmod(0o644)
        stub = [sys.executable, "-S", "-u", str(folder / "stub.py"), str(folder / "go")]
        return {
            "command": stub,
            "tasks": {"worker": trial.hosts},
            "runtime": {"strategy": "none"},
        }
    faults = [fault for fault in (trial.fault, trial.second) if fault is not None]
    may_survive = all(
        fault.blame in (Blame.NOBODY, Blame.PERHAPS_HOST) for fault in faults
    )
    epochs = _EPOCHS_TO_THE_END if may_survive else _EPOCHS_FOR_EVER
    script = str(REPOSITORY / "examples" / "digits.py")
    words = ["--epochs", str(epochs), "--output", str(folder / "trained")]
    found: dict[str, Any] = {
        "command": ["python", script, *words],
        "tasks": {"worker": trial.hosts},
    }
    if trial.program == "ps":
        found["tasks"] = {"worker": trial.hosts - 1, "ps": 1}
    elif trial.program == "local_sgd":
        found["runtime"] = {"strategy": "local_sgd", "sync_every": 10}
    return found

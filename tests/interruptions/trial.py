"""Interrupts a program at a random point, and checks what it has saved."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.kit.cluster import Cluster, Running
from tests.kit.waiting import eventually

PROGRAM = Path(__file__).parents[1] / "runtime" / "programs" / "interrupted.py"
IDIOMS = ("flag", "except", "handler", "slurm", "atexit")
MORE_IDIOMS = ("eager", "loop", "busy", "saving")
TASKS = ("worker:0", "worker:1")
SERVED = ("--ps", "1", *("--set", "runtime.strategy=parameter_server"))
STRATEGIES = {
    "collective": (),
    "parameter_server": (*SERVED, "--set", "runtime.synchronous=true"),
    "replicated": ("--ps", "1", "--set", "runtime.strategy=replicated"),
    "asynchronous": SERVED,
    "local_sgd": ("--set", "runtime.strategy=local_sgd"),
}
"""The words of ``launch`` for each; the last two do not train as one machine."""
INDEPENDENT = ("asynchronous", "local_sgd")
DEADLINE_S = 120.0
GRACE_S = 30.0
_FIRST_STEPS = 40


@dataclass(frozen=True, slots=True)
class Interruption:
    """Which program gets which signal, and when."""

    idiom: str
    number: signal.Signals
    whom: str
    """``launcher``, ``all`` tasks, or the name of one."""
    after: str
    """What a task prints before."""
    by: str
    """That task."""
    delay_s: float

    def __str__(self) -> str:
        return (
            f"{self.idiom}: {self.number.name} to {self.whom}, "
            f"{self.delay_s * 1000:.1f} ms after {self.after!r} of {self.by}"
        )


def drawn(seed: int, idiom: str | None = None) -> Interruption:
    """The interruption of this seed."""
    rng = random.Random(seed)
    idiom = idiom or IDIOMS[seed % len(IDIOMS)]
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if idiom == "slurm":
        numbers = [signal.SIGUSR1]
    elif idiom in MORE_IDIOMS:
        numbers = [signal.SIGTERM, signal.SIGINT]
    step = rng.choice([0, 1, 2, rng.randrange(3, _FIRST_STEPS)])
    if idiom == "busy":
        step = 0
    return Interruption(
        idiom,
        rng.choice(numbers),
        rng.choice(["launcher", "all", *TASKS]),
        f"step {step}\n" if step else "begun\n",
        rng.choice(TASKS),
        rng.uniform(0, 0.1),
    )


def run(
    cluster: Cluster,
    chosen: Interruption,
    settings: Sequence[str] = (),
    strategy: str = "collective",
) -> list[str]:
    """Run the program and interrupt it; what is wrong, in sentences.

    ``settings`` are those of ``--set``.
    """
    words = ["-n", str(len(TASKS)), *STRATEGIES[strategy]]
    for setting in (f"grace={GRACE_S:g}s", *settings):
        words += ["--set", setting]
    if strategy == "asynchronous" and chosen.whom != "all":
        # No rank learns of another one's signal.
        chosen = replace(chosen, whom="launcher")
    command = [sys.executable, str(PROGRAM), chosen.idiom]
    running = cluster.start(*words, "--", *command)
    running.wait_for_text("begun\n", *TASKS, timeout_s=DEADLINE_S)
    running.wait_for_text(chosen.after, chosen.by, timeout_s=DEADLINE_S)
    until_s = time.monotonic() + chosen.delay_s
    eventually(lambda: time.monotonic() >= until_s, lambda: "the time", 10)
    _send(running, chosen)
    began_s = time.monotonic()
    code = running.end(2 * GRACE_S)
    took_s = time.monotonic() - began_s
    together = strategy not in INDEPENDENT
    return [*_problems(cluster, running, code, took_s, together)]


def _send(running: Running, chosen: Interruption) -> None:
    if chosen.whom == "launcher":
        running.signal(chosen.number)
        return
    tasks = TASKS if chosen.whom == "all" else (chosen.whom,)
    for task in tasks:
        pid = running.wait_for("task", task=task, state="running")["pid"]
        with suppress(ProcessLookupError):
            os.kill(pid, chosen.number)


def _problems(
    cluster: Cluster, running: Running, code: int, took_s: float, together: bool
) -> Iterator[str]:
    texts = {task: running.text(task) for task in TASKS}
    handled = {
        task: re.findall(r"^handled at step (\d+)$", text, re.MULTILINE)
        for task, text in texts.items()
    }
    if any(len(steps) != 1 for steps in handled.values()):
        yield f"the handlers ran so often: {handled}"
    if together and len({*map(tuple, handled.values())}) != 1:
        yield f"the steps differ: {handled}"
    for task, text in texts.items():
        if "CollectiveError" in text or "PeerLost" in text or "Mismatch" in text:
            yield f"{task} got an error of an exchange"
    if took_s > GRACE_S:
        yield f"it took {took_s:.1f} s"
    if code not in (0, 1, 124, 130, 143):
        yield f"the exit code is {code}"
    files = sorted(each.name for each in cluster.folder.iterdir())
    saved = [each for each in files if not re.match(r"state|(out|err)-\d+$", each)]
    if saved != ["saved.keras"]:
        yield f"the files are {saved}"
        return
    steps = handled[TASKS[0]]
    found = saved_step(cluster.folder / "saved.keras")
    if found is None or (together and [str(found)] != steps):
        yield f"the file is of step {found}, not {steps}"


def saved_step(path: Path) -> int | None:
    """The steps of the optimizer in a file of Keras; None if it is not whole."""
    import h5py

    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is not None:
                return None
            with file.open("model.weights.h5") as weights, h5py.File(weights) as inner:
                return int(inner["optimizer/vars/0"][()])
    except (zipfile.BadZipFile, OSError, KeyError):
        return None

"""A long run of one target, in a process of its own: a crash there is a defect, too.

The child writes each input to shared memory before it runs it, and reports by a pipe.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import tempfile
import time
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from select import select
from tempfile import TemporaryDirectory

from tests.fuzz.coverage import Arc, Coverage, lines_of
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Target
from tests.fuzz.trial import MOST_S, Defect, Outcome, attempt, limit_memory

_TRACED_S = 8 * MOST_S
"""The first, traced run of an input may take longer."""
_SILENT_S = 60.0
"""A child that does not begin another input for so long hangs."""
_SHRINK_S = 3.0
_REFRESH_S = 1.0
_MOST_DEFECTS = 20


@dataclass
class Report:
    """The row of one target in the table, and its defects."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    lines: int = 0
    corpus: int = 0
    slowest_s: float = 0.0
    slowest_bytes: int = 0
    peak_bytes: int = 0
    refused: int = 0
    defects: list[tuple[str, str]] = field(default_factory=list)
    """What is wrong, and the input as one word; see ``packed``."""


def packed(data: bytes) -> str:
    """An input as one word, for the command line."""
    return b64encode(zlib.compress(data, 9)).decode()


def campaign(
    target: Target, seconds: float, seed: int, show: Callable[[Report], None]
) -> Report:
    """Try inputs for so long. ``show`` is called about every second."""
    # The child may be killed, so its files are ours to remove.
    with TemporaryDirectory(prefix="tfcluster-fuzz-") as scratch:
        return _campaign(target, seconds, seed, show, scratch)


def _campaign(
    target: Target,
    seconds: float,
    seed: int,
    show: Callable[[Report], None],
    scratch: str,
) -> Report:
    size = target.most_bytes + 8
    current = mmap.mmap(-1, size)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        tempfile.tempdir = scratch
        code = 1
        try:
            _Child(target, seed, current, writing).run(seconds)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    report = _followed(target, reading, child, show)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if status:
        length = int.from_bytes(current[:8], "big")
        how = f"the process ended with status {status}"
        report.defects.append((how, packed(current[8 : 8 + length])))
    return report


def _followed(
    target: Target, reading: int, child: int, show: Callable[[Report], None]
) -> Report:
    report = Report(target.name)
    rest = b""
    while True:
        if not select([reading], [], [], _SILENT_S)[0]:
            os.kill(child, signal.SIGKILL)
            return report
        data = os.read(reading, 1 << 20)
        if not data:
            return report
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            report = Report(**json.loads(lines[-1]))
            report.defects = [(text, word) for text, word in report.defects]
            show(report)


class _Child:
    def __init__(
        self, target: Target, seed: int, current: mmap.mmap, writing: int
    ) -> None:
        self._target = target
        self._random = Random(f"{seed} {target.name}")
        self._current = current
        self._writing = writing
        self._coverage = Coverage(target.modules)
        self._known: set[Arc] = set()
        self._corpus: list[bytes] = []
        self._defects: dict[tuple[str, str], None] = {}
        self._report = Report(target.name)

    def run(self, seconds: float) -> None:
        limit_memory()
        begin = shown = time.monotonic()
        for seed in self._target.seeds():
            self._try(seed)
            self._corpus.append(seed)
        while (now := time.monotonic()) - begin < seconds:
            self._try(self._next())
            if now - shown > _REFRESH_S:
                shown = now
                self._tell(now - begin)
        self._tell(time.monotonic() - begin)

    def _next(self) -> bytes:
        corpus = self._corpus
        # New inputs have been tried less often than old ones.
        recent = corpus[-32:] if self._random.random() < 0.4 else corpus
        return mutated(
            self._random,
            self._random.choice(recent),
            others=corpus,
            words=self._target.words,
            most_bytes=self._target.most_bytes,
        )

    def _try(self, data: bytes) -> None:
        self._note(data)
        with self._coverage.traced():
            outcome = attempt(self._target, data, most_s=_TRACED_S)
        new = self._coverage.arcs - self._known
        if outcome.seconds > MOST_S / 2 or outcome.defect:
            outcome = attempt(self._target, data, most_s=2 * MOST_S)
        if outcome.defect is None and outcome.seconds > MOST_S:
            slow = Defect("slow", self._target.name, f"{outcome.seconds:.1f} s")
            outcome = Outcome(outcome.seconds, outcome.peak_bytes, False, slow)
        self._count(data, outcome)
        if new and outcome.defect is None:
            self._known |= new
            self._corpus.append(data)

    def _note(self, data: bytes) -> None:
        self._current[:8] = len(data).to_bytes(8, "big")
        self._current[8 : 8 + len(data)] = data

    def _count(self, data: bytes, outcome: Outcome) -> None:
        report, defect = self._report, outcome.defect
        report.inputs += 1
        report.refused += outcome.refused
        if outcome.seconds > report.slowest_s:
            report.slowest_s, report.slowest_bytes = outcome.seconds, len(data)
        if outcome.peak_bytes < 1 << 40:
            report.peak_bytes = max(report.peak_bytes, outcome.peak_bytes)
        if defect is None or len(self._defects) >= _MOST_DEFECTS:
            return
        key = (defect.kind, defect.place)
        if key not in self._defects:
            self._defects[key] = None
            report.defects.append((defect.text, packed(self._shrunk(data, key))))

    def _shrunk(self, data: bytes, key: tuple[str, str]) -> bytes:
        """A shorter input with the same defect, as far as a few seconds suffice."""
        deadline = time.monotonic() + _SHRINK_S
        size = len(data) // 2
        while size and time.monotonic() < deadline:
            at = 0
            while at < len(data) and time.monotonic() < deadline:
                shorter = data[:at] + data[at + size :]
                self._note(shorter)
                defect = attempt(self._target, shorter, most_s=2 * MOST_S).defect
                if defect is not None and (defect.kind, defect.place) == key:
                    data = shorter
                else:
                    at += size
            size //= 2
        return data

    def _tell(self, seconds: float) -> None:
        report = self._report
        report.seconds, report.corpus = seconds, len(self._corpus)
        report.lines = lines_of(self._known)
        os.write(self._writing, json.dumps(vars(report)).encode() + b"\n")

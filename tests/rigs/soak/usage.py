"""Samples what the processes and files of a run use, and tells whether that is flat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

OLD_S = 20.0
"""A process that is younger is not sampled: it may still trace."""

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """``last`` may exceed ``first`` by this share, and by this much."""

    share: float
    more: float

    def holds(self, first: float, last: float) -> bool:
        return last <= first * (1 + self.share) + self.more


RULES: Mapping[str, Limit] = {
    "memory": Limit(0.10, 16 * MiB),
    "open files": Limit(0.0, 4),
    "threads": Limit(0.0, 4),
    "cache": Limit(0.05, MiB),
}
RECORD_PER_MINUTE = 256 * 1024
"""The record has the logs and events, and so may grow; but not by more than this."""

RULE = (
    "flat: the median of the last tenth of the samples exceeds that of the first tenth "
    "by at most 10 % + 16 MiB of memory, 4 open files, 4 threads, 5 % + 1 MiB of "
    f"cache; the record grows by at most {RECORD_PER_MINUTE // 1024} KiB a minute. "
    "Samples are taken while the training goes on, of processes that are at least "
    f"{OLD_S:g} s old; of several with the same role, the largest counts."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The values at a time, by what they are of and what they are."""

    at_s: float
    values: Mapping[tuple[str, str], float]


def sample(pids: Mapping[str, Iterable[int]], files: Mapping[str, Path]) -> Sample:
    """``pids`` by role, ``files`` by name."""
    values: dict[tuple[str, str], float] = {}
    for role, each in pids.items():
        for pid in each:
            with suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if time.time() - process.create_time() < OLD_S:
                    continue
                found = {
                    "memory": process.memory_info().rss,
                    "open files": process.num_fds(),
                    "threads": process.num_threads(),
                }
                for what, value in found.items():
                    key = (role, what)
                    values[key] = max(values.get(key, 0), value)
    for name, path in files.items():
        values[name, "size"] = size_bytes(path)
    return Sample(time.monotonic(), values)


def size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    whose: str
    what: str
    first: float
    last: float
    flat: bool


def rows(samples: Sequence[Sample]) -> list[Row]:
    """The first and the last tenth of the samples of each value."""
    found = []
    for key in sorted({key for each in samples for key in each.values}):
        known = [
            (each.at_s, each.values[key]) for each in samples if key in each.values
        ]
        count = max(1, len(known) // 10)
        (began, first), (ended, last) = _middle(known[:count]), _middle(known[-count:])
        whose, what = key
        if whose == "record":
            flat = last - first <= RECORD_PER_MINUTE * max(1.0, (ended - began) / 60)
        else:
            flat = RULES[whose if whose == "cache" else what].holds(first, last)
        found.append(Row(whose, what, first, last, flat))
    return found


def _middle(known: Sequence[tuple[float, float]]) -> tuple[float, float]:
    times, values = zip(*known, strict=True)
    return statistics.median(times), statistics.median(values)


def table(found: Sequence[Row]) -> list[str]:
    cells: list[tuple[str, ...]] = [("", "", "first tenth", "last tenth", "")]
    for row in found:
        numbers = (row.first, row.last)
        in_bytes = row.what in ("memory", "size")
        shown = [f"{n / MiB:.2f} MiB" if in_bytes else f"{n:.0f}" for n in numbers]
        cells.append((row.whose, row.what, *shown, "flat" if row.flat else "GROWS"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in (2, 3) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]

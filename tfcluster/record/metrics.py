"""The metrics of a run: what each task did and used over time, as lines of JSON.

``docs/record.md`` describes the lines. A series (one type, one task) gets rarer lines
as it grows older, so the record stays small. Reading skips whatever is not valid; lines
that cannot be written are lost, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.protocol.task_events import ExchangeTotal
from tfcluster.record import events
from tfcluster.record.events import (
    facts,
    integer,
    metric_values,
    number,
    objects,
    read_events,
    text,
)
from tfcluster.record.files import open_private, write_all
from tfcluster.record.paths import RunPaths

SAMPLE, EPOCH, EXCHANGES = "sample", "epoch", "exchanges"

_LINES = 10_000
_MOST_OF_SERIES = 1000
_FEWEST_OF_SERIES = 50
_WHAT_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One GPU that a task may use; None: the driver does not report it."""

    gpu: int = 0
    busy: float | None = None
    """The share of time, 0..1, in which the GPU computed."""
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    t: float
    """Unix time."""
    task: str
    attempt: int = 0
    step: int | None = None
    steps_per_s: float | None = None
    wait_share: float | None = None
    exchanged_bytes: int | None = None
    """Since the start of the attempt."""
    epoch: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The metrics of its rows in this epoch so far; None: not a finite number."""
    rss_bytes: int | None = None
    max_rss_bytes: int | None = None
    """The largest resident memory of its first process, once the task has ended."""
    cpu_s: float | None = None
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    t: float
    task: str
    attempt: int = 0
    step: int | None = None
    epoch: int
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Metrics:
    samples: tuple[Sample, ...] = ()
    epochs: tuple[EpochEnd, ...] = ()
    exchanges: Mapping[str, tuple[ExchangeTotal, ...]] = field(default_factory=dict)
    """The latest totals of each task."""


def read_metrics(paths: RunPaths) -> Metrics:
    """The metrics of a run so far; empty if there is no file."""
    return metrics_of(read_events(paths.metrics))


def metrics_of(lines: Iterable[Mapping[str, Any]]) -> Metrics:
    samples, epochs = [], []
    exchanges: dict[str, tuple[ExchangeTotal, ...]] = {}
    for line in lines:
        task = text(line, "task")
        if task is None or number(line, "t") is None:
            continue
        match line.get("type"):
            case "sample":
                samples.append(_sample(line))
            case "epoch" if integer(line, "epoch") is not None:
                epochs.append(
                    EpochEnd(
                        **facts(EpochEnd, line),
                        metrics=metric_values(line.get("metrics")),
                    )
                )
            case "exchanges":
                exchanges[task] = tuple(exchange_totals(line))
    return Metrics(tuple(samples), tuple(epochs), exchanges)


def most_of_series(tasks: int) -> int:
    """After how many lines those of a series get rarer, in a run with many tasks."""
    return max(_FEWEST_OF_SERIES, min(_MOST_OF_SERIES, _LINES // max(tasks, 1)))


def exchange_totals(source: Mapping[str, Any]) -> list[ExchangeTotal]:
    return [
        ExchangeTotal(
            **facts(ExchangeTotal, entry)
            | {"what": (text(entry, "what") or "?")[:_WHAT_CHARS]}
        )
        for entry in objects(source, "totals")
    ]


def _sample(line: Mapping[str, Any]) -> Sample:
    return Sample(
        **facts(Sample, line) | {"exchanged_bytes": integer(line, "bytes")},
        metrics=metric_values(line.get("metrics")),
        gpus=tuple(GpuUse(**facts(GpuUse, entry)) for entry in objects(line, "gpus")),
    )


_SAMPLE_S = 0.9
"""The shortest time between two samples of a task; the caller's clock is not exact."""
_MOST_WAITING = 64
"""The most batches of lines that wait for a slow disk; further batches are lost."""

_Line = Mapping[str, Any]


class MetricsWriter:
    """Appends to ``metrics.ndjson``. Its methods do not wait for the disk.

    The time between two lines of a series is at least a part of the series' age: one of
    ``most`` parts. The last line of each series is never lost.
    """

    def __init__(self, paths: RunPaths, most: int) -> None:
        self._path = paths.metrics
        self._most = most
        self._sampled: dict[str, Mapping[str, Any]] = {}
        self._began_s: dict[tuple[str, str], float] = {}
        self._due_s: dict[tuple[str, str], float] = {}
        self._held_back: dict[tuple[str, str], _Line] = {}
        self._queue: SimpleQueue[Sequence[_Line] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def sample(self, t_s: float, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Record what tasks do and use at a Unix time, if it has changed."""
        news = {task: v for task, v in tasks.items() if v != self._sampled.get(task)}
        self._sampled.update(news)
        stamp = {"t": round(t_s, 3), "type": SAMPLE}
        lines = [{**stamp, "task": task, **values} for task, values in news.items()]
        self._put([line for line in lines if self._is_due(line)])

    def add(self, line: _Line) -> None:
        """Record a line of another type, which has ``t``, ``type`` and ``task``."""
        self._put([line] if self._is_due(line) else [])

    def close(self, timeout_s: float) -> None:
        """Write what is left; give up after ``timeout_s``."""
        self._put(list(self._held_back.values()))
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _is_due(self, line: _Line) -> bool:
        """Whether to write the line now; if not, it waits for the series' end."""
        t_s, series = line["t"], (line["type"], line["task"])
        age_s = t_s - self._began_s.setdefault(series, t_s)
        if t_s < self._due_s.get(series, t_s):
            self._held_back[series] = line
            return False
        self._held_back.pop(series, None)
        least_s = _SAMPLE_S if line["type"] == SAMPLE else 0.0
        self._due_s[series] = t_s + max(least_s, age_s / self._most)
        return True

    def _put(self, lines: Sequence[_Line]) -> None:
        if not lines or self._queue.qsize() >= _MOST_WAITING:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write, name="metrics", daemon=True
            )
            self._thread.start()
        self._queue.put(lines)

    def _write(self) -> None:
        while (lines := self._queue.get()) is not None:
            # Not only disk errors: the next lines may be good.
            with contextlib.suppress(Exception):
                self._append(b"".join(map(events.encode, lines)))

    def _append(self, data: bytes) -> None:
        descriptor = open_private(self._path, os.O_RDWR | os.O_APPEND)
        try:
            # After a full disk, the last line may be incomplete.
            write_all(descriptor, events.mend(descriptor) + data)
        finally:
            os.close(descriptor)

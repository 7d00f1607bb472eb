"""The metrics of a run: what each task did and used over time, as lines of JSON.

``docs/record.md`` describes the lines. A series (the lines of one type about one task)
is halved when it becomes long, so the record of an arbitrarily long run stays small and
covers the whole run. Reading skips whatever is not valid.

Metrics are worth less than the run: when the disk is slow or full, or a line cannot be
written for another reason, lines are lost, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from queue import Queue
from typing import Any

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.record import events
from tfcluster.record.events import (
    Event,
    facts,
    integer,
    metric_values,
    number,
    objects,
    read_events,
    text,
)
from tfcluster.record.files import open_private, replace_file, write_all
from tfcluster.record.paths import RunPaths

SAMPLE, EPOCH, EXCHANGES = "sample", "epoch", "exchanges"

_MOST_LINES = 40_000
_MOST_OF_SERIES = 2000
_FEWEST_OF_SERIES = 100
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
    """What a task was doing and using at some time; None: unknown."""

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
    """The metrics of a whole epoch, including validation."""

    t: float
    task: str
    attempt: int = 0
    step: int | None = None
    epoch: int
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTotal:
    """The total cost of a task's exchanges for one purpose."""

    what: str
    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Metrics:
    """All metrics of a run, in order of time."""

    samples: tuple[Sample, ...] = ()
    epochs: tuple[EpochEnd, ...] = ()
    exchanges: Mapping[str, tuple[ExchangeTotal, ...]] = field(default_factory=dict)
    """The latest totals of each task."""


def read_metrics(paths: RunPaths) -> Metrics:
    """The metrics of a run so far; empty if there is no file."""
    return metrics_of(read_events(paths.metrics))


def metrics_of(lines: Iterable[Mapping[str, Any]]) -> Metrics:
    """The metrics in these lines."""
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
    """How many lines a series may have in a run with this many tasks."""
    wanted = _MOST_LINES // max(tasks, 1)
    return max(_FEWEST_OF_SERIES, min(_MOST_OF_SERIES, wanted))


def series_of(line: Mapping[str, Any]) -> tuple[str, str]:
    """The series that a line belongs to."""
    return str(line.get("type")), str(line.get("task"))


def thinned(lines: Sequence[Event], most: int) -> list[Event]:
    """Every second line of the series that have more than ``most / 2`` lines.

    The last line of each series is kept.
    """
    lengths = Counter(map(series_of, lines))
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for line in lines:
        series = series_of(line)
        seen[series] += 1
        is_last = seen[series] == lengths[series]
        if lengths[series] <= most // 2 or seen[series] % 2 or is_last:
            kept.append(line)
    return kept


def exchange_totals(source: Mapping[str, Any]) -> list[ExchangeTotal]:
    """The valid entries of ``totals``."""
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


FIRST_INTERVAL_S = 1.0
_MOST_WAITING = 64
"""The most batches of lines that wait for a slow disk; further batches are lost."""

_Lines = Sequence[Mapping[str, Any]]


class MetricsWriter:
    """Appends to ``metrics.ndjson``. Its methods do not wait for the disk.

    ``most`` is the largest number of lines of a series. ``interval_s`` is the time
    between two samples; it is doubled whenever the samples are thinned.
    """

    def __init__(
        self, paths: RunPaths, most: int, *, interval_s: float = FIRST_INTERVAL_S
    ) -> None:
        self._path = paths.metrics
        self._most = most
        self._interval_s = interval_s
        self._due_s = 0.0
        self._held_back: tuple[float, Mapping[str, Mapping[str, Any]]] | None = None
        self._written: dict[str, Mapping[str, Any]] = {}
        self._queue: Queue[_Lines | None] = Queue()
        self._lengths: Counter[tuple[str, str]] = Counter()
        self._thread: threading.Thread | None = None

    def sample(self, t_s: float, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Record what tasks do and use at a Unix time, if a sample is due.

        A task whose values have not changed is left out.
        """
        if t_s < self._due_s:
            self._held_back = t_s, tasks
            return
        self._due_s = t_s + self._interval_s - 0.1  # the caller's clock is not exact
        self._held_back = None
        self._put_samples(t_s, tasks)

    def add(self, line: Mapping[str, Any]) -> None:
        """Record a line of another type, which has ``t``, ``type`` and ``task``."""
        self._put([line])

    def flush(self) -> None:
        """Wait until the lines so far are written, or lost."""
        self._queue.join()

    def close(self, timeout_s: float) -> None:
        """Write what is left; give up after ``timeout_s``."""
        if self._held_back is not None:
            self._put_samples(*self._held_back)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _put_samples(self, t_s: float, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        news = {task: v for task, v in tasks.items() if v != self._written.get(task)}
        self._written.update(news)
        stamp = {"t": round(t_s, 3), "type": SAMPLE}
        self._put([{**stamp, "task": task, **values} for task, values in news.items()])

    def _put(self, lines: _Lines) -> None:
        if not lines or self._queue.qsize() >= _MOST_WAITING:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write, name="metrics", daemon=True
            )
            self._thread.start()
        self._queue.put(lines)

    # --- the thread ------------------------------------------------------------------

    def _write(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                # Not only disk errors: if the thread ended, flush() would hang.
                with contextlib.suppress(Exception):
                    self._append(lines)
            finally:
                self._queue.task_done()

    def _append(self, lines: _Lines) -> None:
        data = b"".join(map(events.encode, lines))
        descriptor = open_private(self._path, os.O_RDWR | os.O_APPEND)
        try:
            # After a full disk, the last line may be incomplete.
            write_all(descriptor, events.mend(descriptor) + data)
        finally:
            os.close(descriptor)
        self._lengths.update(map(series_of, lines))
        if any(length > self._most for length in self._lengths.values()):
            self._thin()

    def _thin(self) -> None:
        kept = thinned(events.read_events(self._path), self._most)
        replace_file(self._path, b"".join(map(events.encode, kept)), durable=False)
        before, self._lengths = self._lengths, Counter(map(series_of, kept))
        if any(
            series[0] == SAMPLE and self._lengths[series] < length
            for series, length in before.items()
        ):
            self._interval_s *= 2

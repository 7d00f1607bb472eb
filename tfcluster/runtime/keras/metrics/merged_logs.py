"""Merge the logs of a step over all ranks, value by value.

There are three kinds of values, and all ranks agree on the kind. A metric's result is
computed from the metric's merged state. A value derived from such results or from other
logs is recomputed from the merged values. Anything else is averaged over the rows of
the step's batch, like a loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.keras.metrics.step_logs import (
    Numbers,
    Origin,
    Path,
    StepLogs,
    Value,
    as_number,
    combined,
    is_same,
    leaves,
    unique,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import Metric, Model


class Merges(Protocol):
    """Makes metrics temporarily hold the state of all ranks."""

    def merged(
        self, metrics: list[Metric], name: str
    ) -> AbstractContextManager[None]: ...


class MergedLogs:
    """Merges the logs of ``model``'s last step once. All ranks must call this."""

    def __init__(
        self,
        session: Session,
        metrics: Merges,
        model: Model,
        known: StepLogs | None,
        logs: Mapping[str, Value],
    ) -> None:
        self._session = session
        self._metrics = metrics
        self._model = model
        self._known = known
        self._logs = dict(leaves(logs))
        self._own = {path: as_number(value) for path, value in self._logs.items()}

    def values(self) -> dict[Path, Value]:
        """A value for each log, equal on all ranks.

        Each value has the original's type: a Python number, or a number of that dtype.
        """
        session = self._session
        candidates = self._candidates()
        with session.once("result"):
            local = [_result_of(origin) for origin in candidates]
        weight = session.last_rows
        if self._known is not None:
            weight = float(self._known.rows.numpy())
        fitting = [
            [i for i, found in enumerate(local) if is_same(found, number)]
            for number in self._own.values()
        ]
        remade = [self._is_remade(path) for path in self._own]
        ours = json.dumps(
            [weight, fitting, remade, list(map(_sendable, self._own.values()))]
        )
        names = tuple("/".join(path) for path in self._own)
        signature = Signature("logs of the last step", names)
        said = [
            json.loads(text)
            for text in allgather_bytes(session.group, ours.encode(), signature)
        ]
        weights, fits, remakes, numbers = zip(*said, strict=True)
        chosen = self._chosen(candidates, fits)
        merged = self._results([candidates[i] for i in chosen.values()])
        found: dict[Path, Value] = dict(zip(chosen, merged, strict=True))
        again = []
        for place, path in enumerate(self._own):
            if path in found:
                continue
            if all(remake[place] for remake in remakes):
                again.append(path)
            else:
                values = [theirs[place] for theirs in numbers]
                found[path] = self._plain(path, values, weights)
        self._remake(again, found)
        return {path: self._as_before(path, value) for path, value in found.items()}

    # --- results of metrics ---------------------------------------------------------

    def _candidates(self) -> list[Origin]:
        """All metric results that a log may contain, in the same order on all ranks."""
        known = self._known
        metrics = list(self._model.metrics)
        if known is not None:
            metrics += [origin.metric for origin in known.origins.values()]
            for _, sources in known.derived.values():
                metrics += [s.metric for s in sources if isinstance(s, Origin)]
        found = []
        with self._session.once("result"):
            for metric in unique(_with_inner(metrics)):
                for path, _ in leaves(_result_or_none(metric)):
                    found.append(Origin(metric, path))
        return found

    def _chosen(
        self, candidates: Sequence[Origin], fits: Sequence[Sequence[Sequence[int]]]
    ) -> dict[Path, int]:
        """The metric result that each log value is.

        The state may have changed since the result was computed. So a result is chosen
        only if it equals the value on this rank and on every other rank.
        """
        chosen = {}
        for place, path in enumerate(self._own):
            possible = set.intersection(*(set(fit[place]) for fit in fits))
            origin = self._known.origins.get(path) if self._known else None
            if origin is not None:
                possible = {i for i in possible if candidates[i] == origin} or possible
            named = {i for i in possible if _name(candidates[i]) == path[-1]}
            if possible:
                chosen[path] = min(named or possible)
        return chosen

    def _results(self, origins: Sequence[Origin]) -> list[Numbers]:
        if not origins:
            return []
        metrics = unique(origin.metric for origin in origins)
        with (
            self._session.once("result"),
            self._metrics.merged(metrics, self._model.name),
        ):
            return [_result_of(origin) for origin in origins]

    # --- values derived from others -------------------------------------------------

    def _is_remade(self, path: Path) -> bool:
        """Whether recomputing the value from this rank's sources reproduces it."""
        if self._known is None or path not in self._known.derived:
            return False
        derived, sources = self._known.derived[path]
        with self._session.once("result"):
            values: list[Numbers] = [
                _result_of(source)
                if isinstance(source, Origin)
                else self._own.get(source)
                for source in sources
            ]
        if any(value is None for value in values):
            return False
        return bool(np.allclose(derived.of(values), self._own[path], equal_nan=True))

    def _remake(self, paths: Sequence[Path], found: dict[Path, Value]) -> None:
        if not paths or self._known is None:
            return
        derived = [self._known.derived[path] for path in paths]
        origins = [
            source
            for _, sources in derived
            for source in sources
            if isinstance(source, Origin)
        ]
        results = dict(zip(map(_key, origins), self._results(origins), strict=True))
        waiting = dict(zip(paths, derived, strict=True))
        while waiting:
            for path, (made, sources) in list(waiting.items()):
                if any(source in waiting for source in sources):
                    continue
                values = [
                    results[_key(source)]
                    if isinstance(source, Origin)
                    else found[source]
                    for source in sources
                ]
                found[path] = made.of(values)
                del waiting[path]

    # --- anything else --------------------------------------------------------------

    def _plain(
        self, path: Path, values: Sequence[Value], weights: Sequence[float]
    ) -> Value:
        name = "/".join(path)
        own = self._own[path]
        if own is None or any(value is None for value in values):
            return self._logs[path]
        shapes = {np.shape(value) for value in values}
        if shapes != {()} and values.count(values[0]) < len(values):
            self._session.differs(
                f"the value that the step returns as {name} is an array that no metric "
                "tracks: it is computed from the chief's rows only"
            )
            return np.asarray(values[0], own.dtype)
        known = self._known
        array = np.asarray(values)
        if known is not None and path in known.integers:
            array = array.astype(np.int64)
        # If the batch size is known, the number of rows is a constant of the trace.
        rows = array.dtype.kind in "iu" and array.tolist() == list(weights)
        counted = rows or (known is not None and known.is_added_up(path))
        number = combined(array, weights, count=counted)
        if array.dtype.kind in "iu" and not is_same(number, values[0]):
            self._session.warn(
                f"the value that the step returns as {name} is an integer that no "
                "metric tracks: it is treated as a count and summed over the ranks"
            )
        return number

    def _as_before(self, path: Path, value: Value) -> Value:
        """Convert to the type of the original log: Python number or numpy dtype."""
        own, old = self._own[path], self._logs[path]
        if own is None:
            return value
        if isinstance(old, float | int):
            return type(old)(value)
        return np.asarray(value).astype(own.dtype)[()]


def _key(origin: Origin) -> tuple[int, Path]:
    return id(origin.metric), origin.path


def _name(origin: Origin) -> str:
    return origin.path[-1] if origin.path else str(origin.metric.name)


def _with_inner(metrics: Sequence[Metric]) -> Iterator[Metric]:
    """The metrics and their nested metrics."""
    for metric in metrics:
        yield metric
        yield from _with_inner(getattr(metric, "metrics", ()))


def _result_or_none(metric: Metric) -> Value:
    """The metric's result; an empty dictionary if it has none yet."""
    try:
        return metric.result()
    except Exception:  # A custom metric may raise anything.
        return {}


def _result_of(origin: Origin) -> Numbers:
    value = _result_or_none(origin.metric)
    for key in origin.path:
        value = value[key]
    return as_number(value)


def _sendable(number: Numbers) -> object:
    """A number or nested lists of numbers, as JSON represents them."""
    return None if number is None else np.asarray(number).tolist()

"""The logs that a model's step returns, and how the ranks' numbers are merged.

A custom step may return anything under any name: all or some results of metrics, values
derived from these, losses that no metric keeps. While the step is traced or run, this
module records from which metric's ``result()`` each value comes, and from how many rows
it was computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.state.derived_values import Derived, ancestry
from tfcluster.runtime.keras.types import Metric
from tfcluster.runtime.tensor_types import Array, Tensor

T = TypeVar("T")

Path = tuple[str, ...]
"""The keys that lead to a value in nested dictionaries."""

Value: TypeAlias = Any
"""A value in logs: a tensor, a number, an array, or anything else, including a
dictionary of such values."""

Numbers: TypeAlias = Any
"""A numpy number, an array of numbers, or None for anything else."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The metric from which a value comes, and the value's path in ``result()``."""

    metric: Metric
    path: Path = ()


@dataclass(slots=True)
class Recorded:
    """The values that ``result()`` has returned during one call of a step."""

    origins: dict[int, Origin] = field(default_factory=dict)
    """The values' origins, by the id of the value."""
    values: list[Value] = field(default_factory=list)
    """Keeps the values alive, so that their ids remain valid."""

    def add(self, metric: Metric, result: Value) -> None:
        """Record a metric's result, or each value of a result that is a dictionary."""
        for path, value in leaves(result):
            # If a metric calls others, the innermost is recorded first.
            if isinstance(value, tf.Tensor | tf.Variable) or hasattr(value, "path"):
                self.origins.setdefault(id(value), Origin(metric, path))
                self.values.append(value)


@dataclass(slots=True)
class StepLogs:
    """What is known about the logs of one model's ``train_step`` or ``test_step``."""

    rows: Any
    """A float64 ``Variable`` with the weight of this rank's part of the last batch, or
    None if it is not known which logs the step returns."""
    origins: dict[Path, Origin] = field(default_factory=dict)
    derived: dict[Path, tuple[Derived, tuple[Origin | Path, ...]]] = field(
        default_factory=dict
    )
    """Values derived from other values, and the sources of each."""
    counts: set[Path] = field(default_factory=set)
    """Integers computed from the data."""
    sums: set[Path] = field(default_factory=set)
    """Other numbers that are sums over the rows of the batch."""
    integers: set[Path] = field(default_factory=set)
    """All integers; Keras converts logs to floats."""

    def note(self, logs: Mapping[str, Value], recorded: Recorded) -> None:
        """Record that the step has returned ``logs``."""
        self.origins.clear()
        self.derived.clear()
        self.counts.clear()
        self.integers.clear()
        found = dict(leaves(logs))
        plain: dict[Path, Tensor] = {}
        for path, value in found.items():
            origin = recorded.origins.get(id(value))
            if isinstance(value, tf.Tensor) and value.dtype.is_integer:
                self.integers.add(path)
            if origin is not None:
                self.origins[path] = origin
            elif isinstance(value, tf.Tensor) and hasattr(value, "graph"):
                plain[path] = value
        places = {id(value): path for path, value in plain.items()}
        given = {id(v): v for v in (*recorded.values, *plain.values())}
        for path, value in plain.items():
            if value.graph is not tf.compat.v1.get_default_graph():
                continue
            seen = ancestry(value, given)
            if seen.closed:
                sources = tuple(
                    recorded.origins.get(id(source)) or places[id(source)]
                    for source in seen.sources
                )
                self.derived[path] = Derived(value, seen), sources
            elif value.dtype.is_integer and seen.sees_data:
                self.counts.add(path)

    def is_added_up(self, path: Path) -> bool:
        """Whether the number for the batch is the sum of the numbers for its parts."""
        return path in self.counts or path in self.sums

    def unexplained(self, logs: Mapping[str, Value]) -> Iterator[tuple[Path, Tensor]]:
        """The scalars in logs that do not come from metrics or from other logs.

        Variables are not among them.
        """
        for path, value in leaves(logs):
            known = path in self.origins or path in self.derived or path in self.counts
            if not known and isinstance(value, tf.Tensor) and value.shape.rank == 0:
                yield path, value


def leaves(value: Value, path: Path = ()) -> Iterator[tuple[Path, Value]]:
    """The values in nested dictionaries, each with its path."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, str(key)))


def with_leaves(value: Value, new: Mapping[Path, Value], path: Path = ()) -> Value:
    """The same nested dictionaries with the values of ``new``, which has all paths."""
    if not isinstance(value, Mapping):
        return new[path]
    return {
        key: with_leaves(inner, new, (*path, str(key))) for key, inner in value.items()
    }


def as_number(value: Value) -> Numbers:
    """A number or an array of numbers as numpy values; None for anything else."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    if array.dtype.kind == "V":  # Such as bfloat16, which numpy stores as raw bytes.
        array = array.astype(np.float32)
    elif array.dtype.kind not in "fiub":
        return None
    return array[()]


def is_same(one: Numbers, other: Numbers) -> bool:
    """Whether two numbers are exactly equal; NaN equals NaN."""
    if one is None or other is None or np.shape(one) != np.shape(other):
        return False
    pair = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return bool(np.array_equal(*pair, equal_nan=True))


def combined(values: Array, weights: Sequence[float], *, count: bool) -> Numbers:
    """Combine the ranks' values of a number that no metric keeps: a mean over rows.

    The first dimension of ``values`` is the rank; ``weights`` are the ranks' numbers of
    rows. With ``count``, the values are integers computed from the data, which are
    summed instead.
    """
    present = [
        (value, weight)
        for value, weight in zip(values, weights, strict=True)
        if weight > 0.0
    ] or [(values[0], 1.0)]
    own = np.asarray([value for value, _ in present])
    if count or (own.dtype.kind in "iu" and not _all_same(own)):
        return own.sum()
    if _all_same(own) or own.dtype.kind == "b":
        return own[0]
    total = sum(weight for _, weight in present)
    return sum(value * (weight / total) for value, weight in present)


def _all_same(values: Array) -> bool:
    return all(is_same(value, values[0]) for value in values[1:])


def unique(things: Iterable[T]) -> list[T]:
    """Each object once, in order."""
    return list({id(thing): thing for thing in things}.values())

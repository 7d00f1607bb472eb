"""What a model's step returns as its logs, and how that becomes a number of all ranks.

A step of the program's own may return anything under any name: results of metrics, all
or some of them, what it has made of these, losses that no metric keeps. While it is
traced or run, it is noted which metric's ``result()`` each value is, and how many rows
it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.train.derived_values import Derived, ancestry

Path = tuple[str, ...]
"""The keys that lead to a value through nested dictionaries."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A value is this one of those that a metric's ``result()`` has returned."""

    metric: Any
    path: Path = ()


@dataclass(slots=True)
class Recorded:
    """What ``result()`` has returned during one call of a step."""

    origins: dict[int, Origin] = field(default_factory=dict)
    """By the id of the value."""
    values: list[Any] = field(default_factory=list)
    """Keeps the ids valid."""

    def add(self, metric: Any, result: Any) -> None:
        for path, value in leaves(result):
            # Within a metric that calls others, the innermost comes first.
            if isinstance(value, tf.Tensor | tf.Variable) or hasattr(value, "path"):
                self.origins.setdefault(id(value), Origin(metric, path))
                self.values.append(value)


@dataclass(slots=True)
class StepLogs:
    """What is known of the logs of one model's ``train_step`` or ``test_step``."""

    rows: Any
    """A variable: the weight of this rank's part of the last batch."""
    origins: dict[Path, Origin] = field(default_factory=dict)
    derived: dict[Path, tuple[Derived, tuple[Origin | Path, ...]]] = field(
        default_factory=dict
    )
    """What the step makes of other values, and where these come from."""
    counts: set[Path] = field(default_factory=set)
    """Integers that are made of the data."""
    integers: set[Path] = field(default_factory=set)
    """All of them: what Keras makes of logs are floats."""

    def note(self, logs: Mapping[str, Any], recorded: Recorded) -> None:
        """The step has returned ``logs``."""
        self.origins.clear()
        self.derived.clear()
        self.counts.clear()
        self.integers.clear()
        found = dict(leaves(logs))
        plain: dict[Path, Any] = {}
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


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What nested dictionaries hold, with the way there."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, str(key)))


def with_leaves(value: Any, new: Mapping[Path, Any], path: Path = ()) -> Any:
    """The same nested dictionaries, with other values."""
    if not isinstance(value, Mapping):
        return new[path]
    return {
        key: with_leaves(inner, new, (*path, str(key))) for key, inner in value.items()
    }


def as_number(value: Any) -> Any:
    """A number, or an array of them, as numpy has it; None for anything else."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    if array.dtype.kind in "fiub":
        return array[()]
    # Such as bfloat16, which numpy knows by its items only.
    return array.astype(np.float32)[()] if array.dtype.kind == "V" else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two numbers are equal to the last bit; NaN is the same as NaN."""
    if one is None or other is None or np.shape(one) != np.shape(other):
        return False
    pair = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return bool(np.array_equal(*pair, equal_nan=True))


def combined(values: Any, weights: Sequence[float], *, count: bool) -> Any:
    """A number of all ranks; what no metric keeps is a mean over rows.

    ``count``: it is made of the data and an integer.
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


def _all_same(values: Any) -> bool:
    return all(is_same(value, values[0]) for value in values[1:])


def unique(things: Iterable[Any]) -> list[Any]:
    """Each thing once."""
    return list({id(thing): thing for thing in things}.values())

"""The state that a metric keeps in Python: lists, arrays and numbers in attributes."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np


class PythonState:
    """The values of a metric's attributes, to be put back later."""

    def __init__(self, metric: object) -> None:
        self._attributes = vars(metric)
        self._before = {
            name: (value, _contents(value))
            for name, value in self._attributes.items()
            if name not in _of_every_metric()
        }

    def restore(self) -> bool:
        """Put the values back; return whether any had changed."""
        found = self._attributes.keys() - _of_every_metric()
        new = found - self._before.keys()
        for name in new:
            del self._attributes[name]
        changed = [name for name in self._before if self._has_changed(name)]
        for name in changed:
            value, contents = self._before[name]
            self._attributes[name] = value
            _fill(value, contents)
        return bool(new or changed)

    def _has_changed(self, name: str) -> bool:
        value, contents = self._before[name]
        now = self._attributes.get(name)
        if now is not value:
            plain = isinstance(value, bool | int | float | str)
            return not (plain and type(now) is type(value) and now == value)
        return not _is_same(_contents(now), contents)


@cache
def _of_every_metric() -> frozenset[str]:
    """The names of the attributes that Keras itself gives a metric."""
    return frozenset(vars(keras.metrics.Metric(name="metric")))


def _contents(value: Any) -> Any:
    """A copy of the contents of a container or an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set) else None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return _is_same([*one, *one.values()], [*other, *other.values()])
    if one is None:
        return True
    # By identity: tensors and arrays define == elementwise.
    return [id(each) for each in one] == [id(each) for each in other]


def _fill(value: Any, contents: Any) -> None:
    """Give a container or an array the contents that it had."""
    if isinstance(value, np.ndarray):
        value[...] = contents
    elif isinstance(value, list):
        value[:] = contents
    elif isinstance(value, dict | set):
        value.clear()
        value.update(contents)

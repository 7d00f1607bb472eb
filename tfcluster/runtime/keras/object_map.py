"""Values that belong to objects such as variables, optimizers and metrics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class ObjectMap(Generic[V]):
    """A dictionary whose keys are compared by identity and are not kept alive.

    A ``WeakKeyDictionary`` compares its keys with ``==``, which variables and tensors
    define elementwise. The value of an object that is gone stays until a new object
    with the same id replaces it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: Any) -> V | None:
        """The value of ``key``; None if it has none."""
        entry = self._entries.get(id(key))
        # The id may have belonged to another object, which is gone.
        return entry[1] if entry is not None and entry[0]() is key else None

    def of(self, key: Any, make: Callable[[], V]) -> V:
        """The value of ``key``; if it has none, ``make`` creates it."""
        if key not in self:
            self[key] = make()
        return self[key]

    def values(self) -> Iterator[V]:
        """All values, including the values of objects that are gone."""
        return (value for _, value in self._entries.values())

    def __contains__(self, key: Any) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __getitem__(self, key: Any) -> V:
        if key not in self:
            raise KeyError(key)
        return self._entries[id(key)][1]

    def __setitem__(self, key: Any, value: V) -> None:
        self._entries[id(key)] = weakref.ref(key), value

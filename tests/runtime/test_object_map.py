"""Maps whose keys are compared by identity and not kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest

from tfcluster.runtime.keras.object_map import ObjectMap


class Elementwise:
    """Like a tensor: equal to everything, and not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_keys_are_compared_by_identity() -> None:
    one, other = Elementwise(), Elementwise()
    found = ObjectMap[str]()
    found[one] = "one"
    assert one in found
    assert other not in found
    assert found[one] == found.get(one) == "one"
    assert found.get(other) is None
    with pytest.raises(KeyError):
        found[other]


def test_a_value_is_made_once() -> None:
    key = Elementwise()
    found = ObjectMap[list[int]]()
    first = found.of(key, list)
    assert found.of(key, list) is first
    assert list(found.values()) == [first]


def test_keys_are_not_kept_alive_and_their_ids_may_return() -> None:
    found = ObjectMap[str]()
    key = Elementwise()
    found[key] = "old"
    reference, number = weakref.ref(key), id(key)
    del key
    gc.collect()
    assert reference() is None
    # Usually the next object of the same size gets the id; keep those that do not.
    others = []
    for _ in range(10_000):
        new = Elementwise()
        if id(new) == number:
            break
        others.append(new)
    assert new not in found
    assert found.get(new) is None
    assert found.of(new, lambda: "new") == "new"

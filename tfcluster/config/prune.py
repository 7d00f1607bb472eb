"""Removes invalid values from a configuration, so that the rest can be checked.

Pure; knows no keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from tfcluster.config.tree import Path


def without(
    data: dict[str, Any], places: Iterable[Sequence[str | int]]
) -> tuple[dict[str, Any], dict[Path, set[int]]]:
    """A copy of ``data`` without the values at these places.

    If a place does not exist, the deepest value above it is left out. The second result
    maps the paths of lists to the indices of items that were left out.
    """
    # deepcopy keeps shared values shared: aliases may expand to very many values.
    rest = deepcopy(data)
    items: dict[Path, set[int]] = {}
    lists: dict[Path, list[Any]] = {}
    for place in places:
        path, holder = _deepest(rest, place)
        if not path:
            continue
        key = path[-1]
        if isinstance(holder, dict):
            holder.pop(key, None)
        else:
            items.setdefault(path[:-1], set()).add(int(key))
            lists[path[:-1]] = holder
    for path, gone in items.items():
        lists[path][:] = [v for at, v in enumerate(lists[path]) if at not in gone]
    return rest, items


def _deepest(root: dict[str, Any], place: Sequence[str | int]) -> tuple[Path, Any]:
    """The path to the deepest value on the way to ``place``, and its container."""
    path: Path = ()
    holder: Any = root
    node: Any = root
    for part in place:
        inside = part in node if isinstance(node, dict) else False
        if isinstance(node, list) and isinstance(part, int):
            inside = part < len(node)
        if not inside:
            break
        holder, node = node, node[part]
        path = (*path, part)
    return path, holder

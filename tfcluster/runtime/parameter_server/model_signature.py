"""The signature of a model, and how a task's differs from that on the ps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.runtime.parameter_server.placement import Variable

_MOST = 8
"""Maximal number of differences listed in a message."""
_SWITCHES = ("synchronous", "splittable", "together", "servers", "rows_only")


def facts_of(
    variables: Sequence[Variable],
    *,
    synchronous: bool,
    splittable: bool,
    together: bool,
    servers: int,
) -> dict[str, Any]:
    """The signature, which has to be equal on all tasks; suitable for JSON."""
    return {
        "variables": [[v.path, v.dtype, list(v.shape)] for v in variables],
        "rows_only": [v.rows_only for v in variables],
        "synchronous": synchronous,
        "splittable": splittable,
        "together": together,
        "servers": servers,
    }


def differing(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], rank: int
) -> str | None:
    """A sentence on how the model of ``rank`` (``ours``) differs from that on the ps.

    None if it does not.
    """
    if theirs == ours:
        return None
    have = {path: (dtype, tuple(shape)) for path, dtype, shape in theirs["variables"]}
    has = {path: (dtype, tuple(shape)) for path, dtype, shape in ours["variables"]}
    found = [f"{path} is missing" for path in have if path not in has]
    found += [f"{path} is not on the ps" for path in has if path not in have]
    found += [
        f"{path} is {_words(*has[path])}, on the ps {_words(*have[path])}"
        for path in has
        if path in have and has[path] != have[path]
    ]
    if not found and list(have) != list(has):
        found = ["its variables are in a different order"]
    if not found:
        found = [
            f"{name.replace('_', ' ')} is {ours[name]}, on the ps {theirs[name]}"
            for name in _SWITCHES
            if ours[name] != theirs[name]
        ]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return f"the model of rank {rank} differs: {'; '.join(found[:_MOST])}{more}"


def _words(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"

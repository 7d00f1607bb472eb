"""A model's signature, and how a task's signature differs from the ps's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.runtime.parameter_server.placement import Variable

_MAX_LISTED = 8
"""The maximum number of differences listed in a message."""
_OPTIONS = ("synchronous", "splittable", "together", "servers", "rows_only")


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
    server_facts: Mapping[str, Any], rank_facts: Mapping[str, Any], rank: int
) -> str | None:
    """A sentence on how the model of ``rank`` differs from the ps's model, or None.

    Both arguments are results of ``facts_of``, perhaps converted to JSON and back.
    """
    if server_facts == rank_facts:
        return None
    on_ps = {
        path: (dtype, tuple(shape)) for path, dtype, shape in server_facts["variables"]
    }
    on_rank = {
        path: (dtype, tuple(shape)) for path, dtype, shape in rank_facts["variables"]
    }
    found = [f"{path} is missing" for path in on_ps if path not in on_rank]
    found += [f"{path} is not on the ps" for path in on_rank if path not in on_ps]
    found += [
        f"{path} is {_described(*on_rank[path])}, on the ps {_described(*on_ps[path])}"
        for path in on_rank
        if path in on_ps and on_rank[path] != on_ps[path]
    ]
    if not found and list(on_ps) != list(on_rank):
        found = ["its variables are in a different order"]
    if not found:
        found = [
            f"{name.replace('_', ' ')} is {rank_facts[name]}, "
            f"on the ps {server_facts[name]}"
            for name in _OPTIONS
            if rank_facts[name] != server_facts[name]
        ]
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return f"the model of rank {rank} differs: {'; '.join(found[:_MAX_LISTED])}{more}"


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"

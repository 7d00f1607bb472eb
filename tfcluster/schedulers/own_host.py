"""Finds this host among the hosts of a job."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping


def own_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """This host's names, first the one that the scheduler gives it, as HOSTNAME."""
    names = (env.get("HOSTNAME", ""), socket.gethostname())
    return tuple(dict.fromkeys(name.lower() for name in names if name))


def is_one_of(name: str, own: Iterable[str]) -> bool:
    """Whether ``name`` is one of this host's names.

    A short and a qualified name match if their first labels are equal. Two qualified
    names must be equal, because clusters with several domains may reuse short names.
    """
    return any(_same(name.lower(), other) for other in own)


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    qualified = "." in one and "." in other
    return not qualified and one.partition(".")[0] == other.partition(".")[0]

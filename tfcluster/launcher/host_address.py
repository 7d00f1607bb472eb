"""Which address of a host goes into TF_CONFIG: one that the other hosts can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from tfcluster.model import Host


def choose_address(
    host: Host,
    *,
    way_in: object,
    local: Sequence[str],
    resolved: Sequence[str],
    alone: bool,
) -> str:
    """The given one; else how we came in, what its name means, or what it has.

    ``way_in`` and ``local`` are the host's own word, ``resolved`` is what its name
    means to us: Debian's 127.0.1.1 and other loopback answers do not count. With one
    host only nobody else has to reach it. Empty if there is none.
    """
    if host.address is not None:
        return host.address
    if alone:
        return "127.0.0.1"
    if isinstance(way_in, str) and _is_reachable(way_in):
        return way_in
    candidates = [a for a in resolved if a in local] + list(local)
    return next(filter(_is_reachable, candidates), "")


def _is_reachable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def resolve(name: str) -> tuple[str, ...]:
    """What a name means here; nothing if it means nothing."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

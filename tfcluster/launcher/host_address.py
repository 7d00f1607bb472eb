"""Chooses the address of a host for TF_CONFIG: one that the other hosts can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from tfcluster.model import Host


def choose_address(
    host: Host,
    *,
    way_in: str | None,
    local: Sequence[str],
    resolved: Sequence[str],
    alone: bool,
) -> str:
    """The configured address; else the one we connected to; else one of the host's own.

    The host itself reports ``way_in``, the address at which our connection arrived, and
    ``local``, its own addresses. Those that are in ``resolved`` (what the host's name
    resolves to here) are preferred. Loopback addresses, such as Debian's 127.0.1.1, do
    not count unless the host is ``alone``. Returns "" if no address is usable.
    """
    if host.address is not None:
        return host.address
    if alone:
        return "127.0.0.1"
    if way_in is not None and _is_reachable(way_in):
        return way_in
    candidates = [a for a in resolved if a in local] + list(local)
    return next(filter(_is_reachable, candidates), "")


def _is_reachable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def is_address(text: str) -> bool:
    """Whether the text is an IP address and not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def resolve(name: str) -> tuple[str, ...]:
    """The addresses that a name resolves to here; () if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

"""A warning about TensorFlow servers, which listen on all interfaces of a machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence

from tfcluster.host_patterns import fold


def exposure_warning(ports: Iterable[int], away: Collection[str] = ()) -> str | None:
    """The warning for these ports; None if there are none.

    ``away`` are the hosts that have them, if it is not this one.
    """
    wanted = sorted(ports)
    if not wanted:
        return None
    if away:
        return describe(wanted, fold(sorted(away)), 0)
    import psutil  # imported here: most launches open no such port

    addresses = {
        name: [entry.address for entry in entries]
        for name, entries in psutil.net_if_addrs().items()
    }
    others = len({user.name for user in psutil.users()} - {psutil.Process().username()})
    here = ", ".join(["localhost", *reachable(addresses)[:4]])
    return describe(wanted, here, others)


def reachable(addresses: Mapping[str, Sequence[str]]) -> list[str]:
    """The addresses at which others can connect; public ones come first, marked."""
    public, private = [], []
    for text in (text for found in addresses.values() for text in found):
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            continue  # a MAC address
        if address.is_loopback or address.is_link_local:
            continue
        if address.is_global:
            public.append(f"{address} PUBLIC")
        else:
            private.append(str(address))
    return public + private


def describe(ports: Sequence[int], where: str, others: int) -> str:
    """The text of the warning."""
    shown = ", ".join(map(str, ports[:6])) + (", ..." if ports[6:] else "")
    users = f"; other users are logged in: {others}" if others else ""
    return (
        f"warning: TensorFlow servers may listen on port {shown} of {where} and accept "
        f"commands from any client{users} (see SECURITY.md)"
    )

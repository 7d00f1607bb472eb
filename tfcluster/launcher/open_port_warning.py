"""A warning about TensorFlow servers, which obey every client that can connect."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence

from tfcluster.host_patterns import fold


def exposure_warning(
    ports: Iterable[int], away: Collection[str] = (), *, anyone: bool
) -> str | None:
    """The warning for these ports; None if only the user can connect to them.

    ``away`` has the hosts with these ports, if they are not on this host. ``anyone``:
    any machine can connect, not only the hosts of the run.
    """
    wanted = sorted(ports)
    if not wanted:
        return None
    if away:
        return describe(wanted, fold(sorted(away)), None, anyone=anyone)
    import psutil  # imported here: most launches open no such port

    addresses = {
        name: [entry.address for entry in entries]
        for name, entries in psutil.net_if_addrs().items()
    }
    others = len({user.name for user in psutil.users()} - {psutil.Process().username()})
    if not anyone:
        return describe(wanted, "localhost", others, anyone=False) if others else None
    here = ", ".join(["localhost", *reachable(addresses)[:4]])
    return describe(wanted, here, others, anyone=True)


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


def describe(
    ports: Sequence[int], where: str, others: int | None, *, anyone: bool
) -> str:
    """The text; ``others`` is the number of other users logged in, if known."""
    shown = ", ".join(map(str, ports[:6])) + (", ..." if ports[6:] else "")
    begin = f"warning: TensorFlow servers may listen on port {shown} of {where} and "
    users = f"; other users are logged in: {others}" if others else ""
    if anyone:
        what = f"accept commands from any client{users}"
    elif others is None:
        what = "accept commands from every user of these hosts"
    else:
        what = f"accept commands from every user of this machine{users}"
    return f"{begin}{what} (see SECURITY.md)"

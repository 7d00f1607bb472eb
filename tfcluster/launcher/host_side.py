"""What the launcher knows about one host, and what it reads from the host's hello."""

from __future__ import annotations

from tfcluster.launcher.agent_connection import AgentConnection
from tfcluster.light_dataclasses import dataclass, field
from tfcluster.model import Host
from tfcluster.protocol.messages import Hello


@dataclass(slots=True)
class HostSide:
    """What the launcher knows about one host."""

    host: Host
    connecting_s: float | None = None
    """When we began to connect to it (Unix time); set by another thread."""
    contact: AgentConnection | None = None
    resolved: tuple[str, ...] = ()
    """What the host's name or configured address resolves to here."""
    address: str = ""
    reachable: str = ""
    """The address for other hosts; same as ``address`` unless this is the only host."""
    added: bool = False
    """Whether it has no task yet, but will have some of the planned job."""
    short: str | None = None
    """Why the host cannot hold more ports."""
    hello: Hello | None = None
    """What its agent has said about the host; None: nothing yet."""
    ports: list[int] | None = None
    preparing: bool = False
    making: bool = False
    """Whether the host is making its environment, which it did not find."""
    warm: set[str] = field(default_factory=set)
    """The keys of its warm interpreters, including those that are starting."""
    warming: set[str] = field(default_factory=set)
    ready: bool = False
    failed: bool = False
    """Whether it was noted as a host that cannot be prepared."""
    closing: bool = False
    gone: bool = False
    dead_guard: int | None = None
    """The pid of its agent's guard if the guard has died."""


def machine_of(hello: Hello) -> tuple[str, ...]:
    """An identity that only agents on the same machine have in common.

    The boot id alone does not suffice, because containers on one machine share it. Nor
    does it suffice with the network namespace: machines cloned from a running one may
    share both, but not their addresses.
    """
    if not hello.boot_id or not hello.network or not hello.addresses:
        return ()
    return (hello.boot_id, hello.network, *sorted(hello.addresses))

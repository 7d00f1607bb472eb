"""What agents have told about their hosts and clocks, and what follows from it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.base.peer_filter import compact
from tfcluster.plan.compose import TaskSpec
from tfcluster.plan.host_patterns import fold
from tfcluster.plan.model import Host
from tfcluster.protocol.messages import Hello
from tfcluster.protocol.wire import INTER_OP_THREADS, INTRA_OP_THREADS


@dataclass(frozen=True, slots=True)
class _Facts:
    host: Host
    hello: Hello
    resolved: tuple[str, ...]
    """What the host's name or configured address resolves to here."""

    def address(self, *, alone: bool) -> str:
        return choose_address(
            self.host,
            way_in=self.hello.way_in,
            local=self.hello.addresses,
            resolved=self.resolved,
            alone=alone,
        )


class HostFacts:
    """The facts about every host that has greeted us, also if it is gone now."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._facts: dict[str, _Facts | None] = dict.fromkeys(hosts)
        """In the hosts' order; None: nothing is known yet."""

    def note(
        self, host: Host, hello: Hello, resolved: tuple[str, ...], *, alone: bool
    ) -> str | None:
        """Note what a host has said; returns why it is of no use, if it is not."""
        facts = self._facts[host.name] = _Facts(host, hello, resolved)
        if facts.address(alone=alone):
            return None
        return (
            "it has no address at which the other hosts can reach it (give it an "
            "'address' under 'hosts')"
        )

    def expect(self, host: str) -> None:
        """Note that a host is started, perhaps anew."""
        self._facts[host] = None

    def __contains__(self, host: str) -> bool:
        return self._facts.get(host) is not None

    def _items(self) -> list[tuple[str, _Facts]]:
        return [(name, facts) for name, facts in self._facts.items() if facts]

    def located(self, hosts: Iterable[Host], *, alone: bool) -> dict[str, Host]:
        """The hosts by name, with what agents said, and addresses for the others."""
        machines = self._machines()
        located = {host.name: host for host in hosts}
        for name, facts in self._items():
            if (host := located.get(name)) is not None:
                own = facts.address(alone=True)
                located[name] = replace(
                    host,
                    address=facts.address(alone=alone) or own,
                    gpus=facts.hello.gpus if host.gpus is None else host.gpus,
                    cpus=facts.hello.cpus,
                    machine=machines.get(name),
                )
        return located

    def peers(self, *, alone: bool) -> tuple[str, ...]:
        """The networks that the hosts of the run are in, as in ``peer_filter``."""
        addresses: list[str] = []
        for _, facts in self._items():
            addresses += (*facts.hello.addresses, *facts.resolved)
            addresses += (facts.address(alone=alone), facts.address(alone=False))
        return compact(addresses)

    def _machines(self) -> dict[str, str]:
        names: dict[tuple[str, ...], list[str]] = {}
        for name, facts in self._items():
            if machine := _machine_of(facts.hello):
                names.setdefault(machine, []).append(name)
        return {name: same[0] for same in names.values() if same[1:] for name in same}

    def shares_files(self, host: str) -> bool:
        facts = self._facts.get(host)
        return facts is None or facts.hello.shared is not False

    def package(self, host: str) -> str:
        facts = self._facts.get(host)
        return PACKAGE_ROOT if facts is None else facts.hello.package


def _machine_of(hello: Hello) -> tuple[str, ...]:
    """An identity that only agents on the same machine have in common.

    The boot id alone does not suffice, because containers on one machine share it. Nor
    does it suffice with the network namespace: machines cloned from a running one may
    share both, but not their addresses.
    """
    if not hello.boot_id or not hello.network or not hello.addresses:
        return ()
    return (hello.boot_id, hello.network, *sorted(hello.addresses))


def machine_warnings(hosts: Iterable[Host]) -> Iterator[str]:
    """One line per machine that several hosts are."""
    by_machine: dict[str, list[str]] = {}
    for host in hosts:
        if host.machine is not None:
            by_machine.setdefault(host.machine, []).append(host.name)
    for first, names in by_machine.items():
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        yield (
            f"warning: {listed} are the same machine; its GPUs and local ranks are "
            "divided among all tasks there; list it once under 'hosts', as "
            f"{{host: {first}, slots: N}}"
        )


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


def resolved_address(host: Host) -> tuple[str, ...]:
    """What the host's name or configured address resolves to; () for an IP address."""
    if host.address is None:
        return resolve(host.name)
    try:
        ipaddress.ip_address(host.address)
    except ValueError:
        return resolve(host.address)
    return ()


def resolve(name: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def threads_env(specs: Iterable[TaskSpec], transport: str) -> dict[str, str | None]:
    """The number of threads in which each rank computes an operation, or several.

    It is the same for all ranks, because the bits of a product depend on it. Empty if
    each rank has a host to itself, or the cores of a host are unknown. Operations go on
    while others wait for the network, or in collective ops: there, all have threads.
    """
    places = [spec.place for spec in specs if spec.place.rank is not None]
    shares = [(place.host.cpus or 0) / place.local_size for place in places]
    if all(place.local_size < 2 for place in places) or not all(shares):
        return {}
    threads = str(max(1, int(min(shares))))
    names = (INTRA_OP_THREADS, INTER_OP_THREADS)
    both = transport != "tensorflow" and len({p.host.name for p in places}) == 1
    return dict.fromkeys(names if both else names[:1], threads)


CLOCK_S = 1.0
"""A clock that is off by more than this is worth a warning."""


_LEAST_S = 0.001
"""A smaller change is not worth recording: events would move by less."""


@dataclass(frozen=True, slots=True)
class Measured:
    """At ``monotonic_s`` on a host, Unix time was ``offset_s`` ahead, in seconds."""

    monotonic_s: float
    offset_s: float
    uncertainty_s: float

    @classmethod
    def of(cls, monotonic_s: float, asked_s: float, heard_s: float) -> Measured:
        """The measurement from an answer: read in the middle, as NTP assumes."""
        half_s = max(0.0, heard_s - asked_s) / 2
        return cls(monotonic_s, asked_s + half_s - monotonic_s, half_s)

    def says_more_than(self, last: Measured | None) -> bool:
        """Whether it is much more certain than ``last``, or clocks have drifted."""
        if last is None or self.uncertainty_s < last.uncertainty_s / 2:
            return True
        moved_s = abs(self.offset_s - last.offset_s)
        return moved_s > max(self.uncertainty_s + last.uncertainty_s, _LEAST_S)


def certain_lead(there_s: float, asked_s: float, heard_s: float) -> float:
    """How far ahead a clock is for certain, in seconds (negative: behind)."""
    return there_s - min(max(there_s, asked_s), heard_s)


def clock_warnings(leads_s: Mapping[str, float]) -> list[str]:
    by_error: dict[int, list[str]] = {}
    for host, lead_s in leads_s.items():
        if abs(lead_s) > CLOCK_S:
            by_error.setdefault(round(lead_s), []).append(host)
    return [
        f"warning: clock of {fold(hosts)}: {error:+d} s from this machine's"
        for error, hosts in by_error.items()
    ]

"""Expands the ``hosts:`` list to one entry per host, and checks the names.

Resolves no name and contacts no host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.config.diagnostics import Findings
from tfcluster.config.models import HostItem
from tfcluster.config.tree import Mark, Path, Scalar, find, shown
from tfcluster.plan.host_patterns import HostlistError, expand, host_name_problem
from tfcluster.plan.model import HostEntry

MAX_HOSTS = 100_000


@dataclass(slots=True)
class _Seen:
    """The names and addresses listed so far, with their places."""

    names: dict[tuple[str, int | None], Mark] = field(default_factory=dict)
    addresses: dict[tuple[str, int | None], str] = field(default_factory=dict)


def host_entries(
    items: Sequence[HostItem], findings: Findings
) -> tuple[HostEntry, ...]:
    """One entry per host, in the order of the list; problems go to ``findings``."""
    seen = _Seen()
    entries: list[HostEntry] = []
    for index, item in enumerate(items):
        entries.extend(
            _expanded(item, findings.item(("hosts",), index), findings, seen)
        )
        if len(entries) > MAX_HOSTS:
            findings.error(("hosts",), f"more than {MAX_HOSTS} hosts")
            break
    return tuple(entries)


def _expanded(
    item: HostItem, path: Path, findings: Findings, seen: _Seen
) -> Iterator[HostEntry]:
    node = find(findings.root, (*path, "host")).node
    try:
        names = expand(item.host)
    except HostlistError as error:
        mark = node.at(error.column - 1) if isinstance(node, Scalar) else node.mark
        findings.report.error(mark, f"{shown(node)}: {error.message}")
        return
    if item.address is not None and not _one_address(item, names, path, findings):
        return
    for name in names:
        if problem := host_name_problem(name):
            findings.report.error(node.mark, f"{name[:60]!r} {problem}", _hint(name))
            return
        _check_repeats(name, item, node.mark, findings, seen)
        yield HostEntry(
            host=name,
            slots=item.slots,
            gpus=item.gpus,
            address=item.address,
            user=item.user,
            port=item.port,
            python=item.python,
        )


def _hint(name: str) -> str | None:
    if "@" in name:
        user, _, host = name.partition("@")
        return f"write {{host: {host[:60]}, user: {user[:60]}}}"
    return None


def _one_address(
    item: HostItem, names: Sequence[str], path: Path, findings: Findings
) -> bool:
    """Whether the item's address is valid and the item is a single host."""
    where, address = (*path, "address"), item.address or ""
    if len(names) > 1:
        findings.error(where, f"one address for {len(names)} hosts")
        return False
    if problem := host_name_problem(address):
        findings.error(where, f"{address[:60]!r} {problem}")
        return False
    return True


def _check_repeats(
    name: str, item: HostItem, mark: Mark, findings: Findings, seen: _Seen
) -> None:
    place = (name, item.port)
    if place in seen.names:
        first = seen.names[place]
        where = f"{first.line}:{first.column}" if first.line else str(first)
        message = f"{name!r} is already listed at {where}"
        hint = f"for several tasks on a host write {{host: {name}, slots: 2}}"
        findings.report.error(mark, message, hint)
        return
    seen.names[place] = mark
    address = (item.address or name, item.port)
    other = seen.addresses.setdefault(address, name)
    if other != name:
        message = f"{other} and {name} are the same machine: {address[0]}"
        findings.report.warn(mark, message, "it runs the tasks of both")

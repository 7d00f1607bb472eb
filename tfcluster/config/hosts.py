"""Expands the ``hosts:`` list to single hosts, and checks the names.

Resolves no name and contacts no host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tfcluster.base.light_dataclasses import replace
from tfcluster.config.diagnostics import Findings
from tfcluster.config.models import HostItem
from tfcluster.config.tree import Mark, Path, Scalar, find, shown
from tfcluster.plan.host_patterns import HostlistError, expand, host_name_problem
from tfcluster.plan.model import Host

MAX_HOSTS = 100_000


def listed_hosts(items: Sequence[HostItem], findings: Findings) -> tuple[Host, ...]:
    """The hosts in the list's order, with unique names; problems go to ``findings``."""
    listed: list[tuple[Host, Mark]] = []
    for index, item in enumerate(items):
        listed.extend(_expanded(item, findings.item(("hosts",), index), findings))
        if len(listed) > MAX_HOSTS:
            findings.error(("hosts",), f"more than {MAX_HOSTS} hosts")
            break
    _check_repeats(listed, findings)
    count = Counter(host.name for host, _ in listed)
    return tuple(
        replace(host, name=f"{host.name}:{host.port}", hostname=host.name)
        if host.port and count[host.name] > 1
        else host
        for host, _ in listed
    )


def _expanded(
    item: HostItem, path: Path, findings: Findings
) -> Iterator[tuple[Host, Mark]]:
    node = find(findings.root, (*path, "host")).node
    try:
        names = expand(item.host)
    except HostlistError as error:
        mark = node.at(error.column - 1) if isinstance(node, Scalar) else node.mark
        findings.report.error(mark, f"{shown(node)}: {error.message}")
        return
    if item.address is not None and not _one_address(item, names, path, findings):
        return
    gpus = None if item.gpus is None else tuple(map(str, range(item.gpus)))
    for name in names:
        if problem := host_name_problem(name):
            findings.report.error(node.mark, f"{name[:60]!r} {problem}", _hint(name))
            return
        host = Host(
            name=name,
            slots=item.slots,
            gpus=gpus,
            address=item.address,
            user=item.user,
            port=item.port,
            python=item.python,
        )
        yield host, node.mark


def _hint(name: str) -> str | None:
    if "@" in name:
        user, _, host = name.partition("@")
        return f"write {{host: {host[:60]}, user: {user[:60]}}}"
    return None


def _one_address(
    item: HostItem, names: Sequence[str], path: Path, findings: Findings
) -> bool:
    where, address = (*path, "address"), item.address or ""
    if len(names) > 1:
        findings.error(where, f"one address for {len(names)} hosts")
        return False
    if problem := host_name_problem(address):
        findings.error(where, f"{address[:60]!r} {problem}")
        return False
    return True


def _check_repeats(listed: Sequence[tuple[Host, Mark]], findings: Findings) -> None:
    marks: dict[tuple[str, int | None], Mark] = {}
    names: dict[tuple[str, int | None], str] = {}
    """The name of each address and port."""
    for host, mark in listed:
        if (first := marks.get((host.name, host.port))) is not None:
            where = f"{first.line}:{first.column}" if first.line else str(first)
            message = f"{host.name!r} is already listed at {where}"
            hint = f"for several tasks on a host write {{host: {host.name}, slots: 2}}"
            findings.report.error(mark, message, hint)
            continue
        marks[host.name, host.port] = mark
        other = names.setdefault((host.reached_by, host.port), host.name)
        if other != host.name:
            message = f"{other} and {host.name} are the same machine: {host.reached_by}"
            findings.report.warn(mark, message, "it runs the tasks of both")

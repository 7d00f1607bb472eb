"""Applies flags to the tree: ``--set``, ``--name``, and those that replace a file.

The place of a value that a flag sets is the flag, so that problems and origins name it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfcluster.config.diagnostics import Report
from tfcluster.config.text import printable
from tfcluster.config.tree import Entry, Map, Mark, Node, Scalar, Seq, mapping, text
from tfcluster.host_patterns import HostlistError, split

COMMAND_LINE = Mark("command line")
_MAX_KEYS = 8
"""The limit of a key's parts: cluster.yaml is less deep."""
_MANY_SLOTS = 1000
"""A larger number is most likely meant as a port for ssh."""
_WORD = re.compile("[A-Za-z0-9_][A-Za-z0-9_./-]*")
"""Text that means the same in YAML."""
_SLOTS = re.compile(r"(.+?):([0-9]+)", re.DOTALL)


def override(root: Map, settings: Sequence[str], report: Report) -> Map:
    """``root`` with every ``KEY=VALUE`` applied in turn; null removes a key."""
    for setting in settings:
        key, equals, written = setting.partition("=")
        path = key.split(".")
        shown = f"{key}=..." if path[0] == "secrets" else setting
        mark = Mark(f"--set {printable(shown, 80)}")
        if not equals or not all(path) or len(path) > _MAX_KEYS:
            report.error(mark, "not KEY=VALUE", "like --set tasks.worker=4")
            continue
        node = _value(path, written, mark, report)
        root = _with(root, path, node, mark, report)
    return root


def named(root: Map, name: str) -> Map:
    """``root`` with the name from ``--name``."""
    mark = Mark("--name")
    entry = Entry(text("name", mark), text(name, mark))
    return Map({**root.entries, "name": entry}, root.mark)


def _value(path: Sequence[str], written: str, mark: Mark, report: Report) -> Node:
    # Environment values are text; quotes inside the shell's quotes would be a nuisance.
    if "env" in path[:-1]:
        return text(written, mark)
    if _WORD.fullmatch(written):
        return Scalar(written, mark, plain=True, inset=0)
    from tfcluster.config.parse import parse  # imported here: few flags need YAML

    node = parse(written, mark, report)
    return Scalar("", mark, plain=True) if node is None else node


def _with(
    parent: Map, path: Sequence[str], node: Node, mark: Mark, report: Report
) -> Map:
    key, rest = path[0], path[1:]
    entries = dict(parent.entries)
    old = entries.get(key)
    if rest:
        below = _opened(old.node if old else None, mark)
        if below is None:
            message = f"{key!r} is not a mapping: {'.'.join(rest)} cannot be set in it"
            report.error(mark, message, f"set {key!r} as a whole")
            return parent
        node = _with(below, rest, node, mark, report)
    elif isinstance(node, Scalar) and node.plain and node.raw in ("null", "~"):
        entries.pop(key, None)
        return Map(entries, parent.mark)
    entries[key] = Entry(text(key, mark), node)
    return Map(entries, parent.mark)


def _opened(node: Node | None, mark: Mark) -> Map | None:
    """The node as a mapping: a plain count becomes ``{count: N}``; None if it is
    neither."""
    if node is None:
        return mapping(mark, {})
    if isinstance(node, Scalar) and isinstance(node.value, int):
        return mapping(node.mark, {"count": node})
    return node if isinstance(node, Map) else None


def from_flags(
    command: Sequence[str],
    *,
    count: int,
    ps: int,
    gpus: int | None,
    hosts: str | None,
    report: Report,
) -> Map:
    """The tree for ``-n``, ``--ps``, ``--gpus``, ``--hosts`` and a command."""
    workers: Node = Scalar(str(count), Mark("-n"), plain=True)
    if gpus is not None:
        each = Scalar(str(gpus), Mark("--gpus"), plain=True)
        workers = mapping(COMMAND_LINE, {"count": workers, "gpus": each})
    tasks = {"worker": workers}
    if ps:
        tasks["ps"] = Scalar(str(ps), Mark("--ps"), plain=True)
    if any("\0" in word for word in command):
        raise report.failed(COMMAND_LINE, "an argument cannot hold NUL")
    # The user's shell has already expanded variables, so a dollar is literal.
    words = [text(word.replace("$", "$$"), COMMAND_LINE) for word in command]
    nodes: dict[str, Node] = {
        "command": Seq(words, COMMAND_LINE),
        "tasks": mapping(COMMAND_LINE, tasks),
    }
    if hosts is not None:
        mark = Mark("--hosts")
        nodes["backend"] = text("ssh", mark)
        nodes["hosts"] = Seq(_hosts(hosts, mark, report), mark)
    return mapping(COMMAND_LINE, nodes)


def _hosts(written: str, mark: Mark, report: Report) -> list[Node]:
    try:
        items = split(written)
    except HostlistError as error:
        raise report.failed(mark, f"{printable(written)!r}: {error.message}") from error
    return [_host(item, mark, report) for item, _ in items]


def _host(item: str, mark: Mark, report: Report) -> Node:
    user, at, name = item.rpartition("@")
    slots = _SLOTS.fullmatch(name)
    # Several colons without brackets are IPv6 without brackets, reported elsewhere.
    if slots and (":" not in slots[1] or slots[1].endswith("]")):
        if int(slots[2]) > _MANY_SLOTS:
            message = (
                f"{slots[2]} tasks on {slots[1]}: the number after ':' means slots"
            )
            report.warn(mark, message, "write an sshd port in a file")
        nodes = {
            "host": text(slots[1], mark),
            "slots": Scalar(slots[2], mark, plain=True),
        }
    elif at:
        nodes = {"host": text(name, mark)}
    else:
        return text(item, mark)
    return mapping(mark, {**nodes, "user": text(user, mark)} if at else nodes)

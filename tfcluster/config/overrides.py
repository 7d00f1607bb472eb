"""Applies flags to the tree: ``--set``, ``--name``, ``-x``, and those without a file.

The place of a value that a flag sets is the flag, so that problems and origins name it.

Variables that are passed on, by ``-x NAME[=VALUE]`` or ``env: {pass: [NAME]}``, become
ordinary entries of ``env``, or of ``secrets`` if the name looks like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfcluster.config.diagnostics import Report
from tfcluster.config.text import printable
from tfcluster.config.tree import (
    Entry,
    Map,
    Mark,
    Node,
    Scalar,
    Seq,
    find,
    mapping,
    text,
)
from tfcluster.plan.host_patterns import HostlistError, split

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


PASS = "pass"
"""The key below ``env`` that lists names; a plain value is a variable ``pass``."""
SECRET = re.compile(
    r"(?:.*_)?(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS)", re.IGNORECASE
)
"""Names of variables whose values are most likely secret."""


def with_passed(
    root: Map, flags: Sequence[str], environ: Mapping[str, str], report: Report
) -> Map:
    """``root`` with the variables of ``-x`` flags and of all ``pass`` lists.

    A flag replaces what the file says about the same variable, also in ``secrets``. A
    name without a value takes the value in ``environ``; problems go to ``report``.
    """
    passing = _Passing(root, environ, report)
    passing.read_lists()
    for flag in flags:
        passing.add_flag(flag)
    return passing.root


class _Passing:
    def __init__(self, root: Map, environ: Mapping[str, str], report: Report) -> None:
        self.root = root
        self._environ = environ
        self._report = report

    def read_lists(self) -> None:
        """Replace each ``pass`` list, including those of task types."""
        for path in (("env",), *self._task_envs()):
            env = _at(self.root, path)
            if not isinstance(env, Map) or PASS not in env.entries:
                continue
            names = env.entries[PASS].node
            if not isinstance(names, Seq):
                continue
            rest = {name: e for name, e in env.entries.items() if name != PASS}
            self.root = _put(self.root, path, Map(rest, env.mark))
            for item in names.items:
                self._add_item(path, item, rest)

    def _task_envs(self) -> list[tuple[str, ...]]:
        tasks = _at(self.root, ("tasks",))
        kinds = tasks.entries if isinstance(tasks, Map) else {}
        return [("tasks", kind, "env") for kind in kinds]

    def _add_item(
        self, path: tuple[str, ...], item: Node, written: Mapping[str, Entry]
    ) -> None:
        if not isinstance(item, Scalar):
            message = "an item of 'pass' must be the name of a variable"
            self._report.error(item.mark, message, "pass: [WANDB_PROJECT]")
        elif item.raw in written:
            message = f"{item.raw} is passed on, and has a value under 'env:'"
            self._report.error(item.mark, message, "keep one of them")
        elif SECRET.fullmatch(item.raw) and path != ("env",):
            message = f"{item.raw} looks like a secret, which all tasks get"
            self._report.error(item.mark, message, "pass it under the top-level 'env'")
        else:
            self._add(path, item.raw, item.mark)

    def add_flag(self, flag: str) -> None:
        """Apply ``NAME`` or ``NAME=VALUE``."""
        name, equals, value = flag.partition("=")
        mark = Mark(f"-x {printable(name, 80)}")
        if not name:
            self._report.error(mark, "a name is missing", "-x NAME, or -x NAME=VALUE")
        elif not equals:
            self._drop(name)
            self._add(("env",), name, mark)
        elif SECRET.fullmatch(name):
            self._report.error(
                mark,
                f"{name} looks like a secret, and others can read arguments",
                f"`export {name}=...` first, then -x {name}",
            )
        else:
            self._drop(name)
            self._set(("env",), name, value, mark)

    def _add(self, path: tuple[str, ...], name: str, mark: Mark) -> None:
        if name not in self._environ:
            message = f"{printable(name, 80)} is not set where tfcluster is started"
            self._report.error(
                mark, message, f"export it first, or -x {printable(name, 80)}=VALUE"
            )
        elif SECRET.fullmatch(name):
            source = mapping(mark, {"env": text(name, mark)})
            self._put(("secrets",), name, source, mark)
        else:
            self._set(path, name, self._environ[name], mark)

    def _set(self, path: tuple[str, ...], name: str, value: str, mark: Mark) -> None:
        # If references in the value were expanded, the shell did it.
        self._put(path, name, text(value.replace("$", "$$"), mark), mark)

    def _put(self, path: tuple[str, ...], name: str, node: Node, mark: Mark) -> None:
        holder = _at(self.root, path)
        if holder is None:
            holder = mapping(mark, {})
        if isinstance(holder, Map):  # otherwise a wrong type, which is reported later
            entries = {**holder.entries, name: Entry(text(name, mark), node)}
            self.root = _put(self.root, path, Map(entries, holder.mark))

    def _drop(self, name: str) -> None:
        """Remove what the file says about a variable, for some tasks or for all."""
        for path in (("env",), ("secrets",), *self._task_envs()):
            holder = _at(self.root, path)
            if isinstance(holder, Map) and name in holder.entries:
                rest = {k: entry for k, entry in holder.entries.items() if k != name}
                self.root = _put(self.root, path, Map(rest, holder.mark))


def _at(root: Map, path: tuple[str, ...]) -> Node | None:
    place = find(root, path)
    return None if place.rest else place.node


def _put(root: Map, path: Sequence[str], node: Node) -> Map:
    """``root`` with ``node`` at ``path``, whose parents exist or are the root."""
    key, rest = path[0], path[1:]
    old = root.entries.get(key)
    if rest:
        below = old.node if old else None
        if not isinstance(below, Map):
            return root
        node = _put(below, rest, node)
    entry = Entry(old.key if old else text(key, node.mark), node)
    return Map({**root.entries, key: entry}, root.mark)

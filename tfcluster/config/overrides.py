"""Applies flags to the tree: ``--set``, ``--name``, ``-x``, and those without a file.

The place of a value that a flag sets is the flag, so that problems and origins name it.

Variables that are passed on, by ``-x NAME[=VALUE]`` or ``env: {pass: [NAME]}``, become
ordinary entries of ``env``, or of ``secrets`` if the name looks like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfcluster.config.diagnostics import Report
from tfcluster.config.tree import (
    Keys,
    Map,
    Mark,
    Node,
    Scalar,
    Seq,
    at,
    mapping,
    printable,
    put,
    text,
    without,
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
    for setting in settings:
        key, equals, written = setting.partition("=")
        path = tuple(key.split("."))
        shown = f"{key}=..." if path[0] == "secrets" else setting
        mark = Mark(f"--set {printable(shown, 80)}")
        if not equals or not all(path) or len(path) > _MAX_KEYS:
            report.error(mark, "not KEY=VALUE", "like --set tasks.worker=4")
            continue
        node = _value(path, written, mark, report)
        root = _set(root, path, node, mark, report)
    return root


def _value(path: Sequence[str], written: str, mark: Mark, report: Report) -> Node:
    # Environment values are text; quotes inside the shell's quotes would be a nuisance.
    if "env" in path[:-1]:
        return text(written, mark)
    if _WORD.fullmatch(written):
        return Scalar(written, mark, plain=True, inset=0)
    from tfcluster.config.parse import parse  # imported here: few flags need YAML

    node = parse(written, mark, report)
    return Scalar("", mark, plain=True) if node is None else node


def _set(root: Map, path: Keys, node: Node, mark: Mark, report: Report) -> Map:
    for depth in range(1, len(path)):
        above = at(root, path[:depth])
        if isinstance(above, Scalar) and isinstance(above.value, int):
            # A plain count becomes a mapping.
            root = put(root, path[:depth], mapping(above.mark, {"count": above}))
        elif above is not None and not isinstance(above, Map):
            key, rest = path[depth - 1], ".".join(path[depth:])
            message = f"{key!r} is not a mapping: {rest} cannot be set in it"
            report.error(mark, message, f"set {key!r} as a whole")
            return root
    if isinstance(node, Scalar) and node.plain and node.raw in ("null", "~"):
        return without(root, path)
    return put(root, path, node)


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
    if any("\0" in word for word in command):
        raise report.failed(COMMAND_LINE, "an argument cannot hold NUL")
    # The user's shell has already expanded variables, so a dollar is literal.
    words = [text(word.replace("$", "$$"), COMMAND_LINE) for word in command]
    tasks = mapping(COMMAND_LINE, {})
    root = mapping(COMMAND_LINE, {"command": Seq(words, COMMAND_LINE), "tasks": tasks})
    workers = ("tasks", "worker") if gpus is None else ("tasks", "worker", "count")
    for flag, keys, number in (
        ("-n", workers, count),
        ("--gpus", ("tasks", "worker", "gpus"), gpus),
        ("--ps", ("tasks", "ps"), ps or None),
    ):
        if number is not None:
            root = put(root, keys, Scalar(str(number), Mark(flag), plain=True))
    if hosts is not None:
        mark = Mark("--hosts")
        root = put(root, ("backend",), text("ssh", mark))
        root = put(root, ("hosts",), Seq(_hosts(hosts, mark, report), mark))
    return root


def _hosts(written: str, mark: Mark, report: Report) -> list[Node]:
    try:
        items = split(written)
    except HostlistError as error:
        raise report.failed(mark, f"{printable(written)!r}: {error.message}") from error
    return [_host(item, mark, report) for item, _ in items]


def _host(item: str, mark: Mark, report: Report) -> Node:
    user, at_sign, name = item.rpartition("@")
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
    elif at_sign:
        nodes = {"host": text(name, mark)}
    else:
        return text(item, mark)
    return mapping(mark, {**nodes, "user": text(user, mark)} if at_sign else nodes)


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
        for path in (("env",), *self._task_envs()):
            names = at(self.root, (*path, PASS))
            if isinstance(names, Seq):
                self.root = without(self.root, (*path, PASS))
                env = at(self.root, path)
                written = set(env.entries) if isinstance(env, Map) else set()
                for item in names.items:
                    self._add_item(path, item, written)

    def _task_envs(self) -> list[Keys]:
        tasks = at(self.root, ("tasks",))
        kinds = tasks.entries if isinstance(tasks, Map) else {}
        return [("tasks", kind, "env") for kind in kinds]

    def _add_item(self, path: Keys, item: Node, written: set[str]) -> None:
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
            return
        if equals and SECRET.fullmatch(name):
            self._report.error(
                mark,
                f"{name} looks like a secret, and others can read arguments",
                f"`export {name}=...` first, then -x {name}",
            )
            return
        for path in (("env",), ("secrets",), *self._task_envs()):
            self.root = without(self.root, (*path, name))
        if equals:
            self._set(("env",), name, value, mark)
        else:
            self._add(("env",), name, mark)

    def _add(self, path: Keys, name: str, mark: Mark) -> None:
        if name not in self._environ:
            message = f"{printable(name, 80)} is not set where tfcluster is started"
            self._report.error(
                mark, message, f"export it first, or -x {printable(name, 80)}=VALUE"
            )
        elif SECRET.fullmatch(name):
            source = mapping(mark, {"env": text(name, mark)})
            self.root = put(self.root, ("secrets", name), source)
        else:
            self._set(path, name, self._environ[name], mark)

    def _set(self, path: Keys, name: str, value: str, mark: Mark) -> None:
        # If references in the value were expanded, the shell did it.
        node = text(value.replace("$", "$$"), mark)
        self.root = put(self.root, (*path, name), node)

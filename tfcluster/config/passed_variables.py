"""Variables that are passed on: ``-x NAME[=VALUE]`` and ``env: {pass: [NAME]}``.

Turns them into ordinary entries of ``env``, or of ``secrets`` if the name looks like a
secret, so that all later stages only need their values and places.
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

"""Finds the environment variables that a program's source sets. Pure.

The source is read before the program's first line runs, so that a task which needs a
fresh interpreter for these variables gets it before the program has done anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

_LIBRARIES = ("tensorflow", "keras", "tf_keras")
_WORDS = ("environ", "putenv", "unsetenv")
"""A source with none of these words need not be parsed."""

Settings = Mapping[str, str | None]
"""Values by the variables' names; None if the value is unknown or removed."""


def variables_set(source: str, environ: Mapping[str, str]) -> Settings:
    """The variables that ``source`` may set before its first import of TensorFlow.

    Calls of ``setdefault`` count only for names that ``environ`` lacks. A source that
    cannot be parsed sets nothing.
    """
    if not any(word in source for word in _WORDS):
        return {}
    found: dict[str, str | None] = {}
    try:
        tree = ast.parse(source)
        end = min(map(_line, filter(_imports_library, tree.body)), default=None)
        for node in ast.walk(tree):
            if end is None or getattr(node, "lineno", 0) < end:
                found.update(_set_by(node, environ))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return found


def _line(node: ast.stmt) -> int:
    return node.lineno


def _imports_library(node: ast.stmt) -> bool:
    names: Sequence[str] = ()
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    return any(name.split(".")[0] in _LIBRARIES for name in names)


def _set_by(
    node: ast.AST, environ: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _pair(target.slice, node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        called, args = node.func.attr, [*node.args, ast.Constant(None)]
        if called == "putenv":
            yield from _pair(args[0], args[1])
        elif not _is_environ(node.func.value):
            return
        elif called == "setdefault":
            yield from ((k, v) for k, v in _pair(*args[:2]) if k not in environ)
        elif called == "update":
            for word in node.keywords:
                yield from _pair(ast.Constant(word.arg), word.value)
            if isinstance(args[0], ast.Dict):
                for key, value in zip(args[0].keys, args[0].values, strict=True):
                    yield from _pair(key, value)


def _is_environ(node: ast.expr) -> bool:
    return "environ" in (getattr(node, "attr", None), getattr(node, "id", None))


def _pair(key: ast.expr | None, value: ast.expr) -> Iterator[tuple[str, str | None]]:
    name = getattr(key, "value", None)
    if isinstance(name, str):
        known = getattr(value, "value", None)
        yield name, known if isinstance(known, str) else None

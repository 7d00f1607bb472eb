"""Predicts from a program's source whether it will import TensorFlow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tfcluster.plan.program import Program

_MENTION = re.compile(rb"\b(tensorflow|keras|tfcluster)\b")
# A module that only launches runs mentions tfcluster, too.
_MENTION_IN_MODULE = re.compile(
    rb"\b(tensorflow|keras|tfcluster(\.| import )runtime)\b"
)
_MAX_FILES = 200
_MAX_BYTES = 4 << 20


def uses_tensorflow(program: Program, workdir: Path) -> bool:
    """Whether the program or a module beside it mentions TensorFlow or Keras.

    Also True for a program that cannot be read here (an installed module, a file on
    another host).
    """
    _, kind, *rest = program.arguments
    if kind == "-c":
        return bool(_MENTION.search(rest[0].encode(errors="replace")))
    if kind == "-m":
        return True
    script = workdir / kind
    if script.is_dir():
        return True
    return _mentions(script, _MENTION)


def module_uses_tensorflow(file: Path) -> bool:
    """Whether a module, or one beside it that it imports, mentions TensorFlow or Keras.

    Also True for a file that cannot be read.
    """
    return _mentions(file, _MENTION_IN_MODULE)


def _mentions(script: Path, mention: re.Pattern[bytes]) -> bool:
    """Search the script and the modules that it imports from its own folder."""
    folder = script.parent
    waiting, seen = [script], {script}
    while waiting:
        path = waiting.pop()
        try:
            source = path.read_bytes()
        except OSError:
            return path == script
        if len(source) > _MAX_BYTES or mention.search(source):
            return True
        new = set(_imported_beside(source, folder)) - seen
        seen |= new
        waiting += new
        if len(seen) > _MAX_FILES:
            return True
    return False


def _imported_beside(source: bytes, folder: Path) -> list[Path]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    places = [folder.joinpath(*name.split(".")) for name in sorted(names)]
    files = [p.with_suffix(".py") for p in places] + [p / "__init__.py" for p in places]
    return [path for path in files if path.is_file()]

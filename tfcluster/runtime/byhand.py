"""Whether the program itself distributes its training, as scripts for Horovod do.

Such a program gives each rank data of its own, exchanges its gradients and lets rank 0
write files: then nothing of that is done for it. Known from its text before its first
line runs, or else from its first call. Knows neither TensorFlow nor Keras.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from tfcluster.runtime.program import Program

NAMES = ("DistributedOptimizer", "DistributedGradientTape")
_PACKAGE = "tfcluster.runtime"

_claimed = False
_may_claim: Callable[[], None] = lambda: None  # noqa: E731  # a default, not a function


def claimed() -> bool:
    """Whether the program distributes its training by itself."""
    return _claimed


def claim() -> None:
    """The program does. Raises what ``guard`` was given where it is too late."""
    global _claimed
    if not _claimed:
        _may_claim()
        _claimed = True


def guard(check: Callable[[], None]) -> None:
    """Have ``check`` called before the first claim, to raise where it is too late."""
    global _may_claim
    _may_claim = check


def read(program: Program) -> None:
    """Claim where the program's main file says so."""
    if source := source_of(program):
        claim_by(source)


def claim_by(source: str) -> None:
    """Claim where ``source`` says that the program distributes its training."""
    if says_so(source):
        claim()


def says_so(source: str) -> bool:
    """Whether a program imports ``tfcluster.runtime`` and uses one of ``NAMES``."""
    if not any(name in source for name in NAMES):
        return False
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return any(map(_imports_us, nodes)) and any(map(_names_one, nodes))


def _imports_us(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        return _PACKAGE in (node.module, *full)
    return isinstance(node, ast.Import) and any(
        alias.name == _PACKAGE for alias in node.names
    )


def _names_one(node: ast.AST) -> bool:
    return (
        (isinstance(node, ast.Attribute) and node.attr in NAMES)
        or (isinstance(node, ast.Name) and node.id in NAMES)
        or (isinstance(node, ast.alias) and node.name in NAMES)
    )


def source_of(program: Program) -> str | None:
    """The text of a program's main file; None of a module, or where it has none."""
    if program.option == "-c":
        return program.target
    if program.option:
        return None
    try:
        return Path(program.target).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None

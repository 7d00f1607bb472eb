"""Names of a package that are imported on first use, so that importing it is cheap.

The package lists them as imports for type checkers: ``if TYPE_CHECKING: from MODULE
import NAME as NAME``. Its submodules are listed in the same way.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attributes(package: str, **others: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package; ``others`` are modules with another name."""

    @functools.cache
    def modules() -> dict[str, str]:
        """The module of each name."""
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        return {
            alias.name: str(node.module)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname is not None
        }

    def attribute(name: str) -> Any:
        if name == "__all__":
            return sorted({*modules(), *others})
        if name in others:
            return importlib.import_module(f"{package}.{others[name]}")
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules()[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(modules()[name]), name)
        vars(sys.modules[package])[name] = value
        return value

    return attribute

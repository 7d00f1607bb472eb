"""Calls functions before and after a library is imported, without importing it.

This costs nothing in a program that never imports the library. The module does not know
the libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def around_import(
    names: Sequence[str], *, before: Callable[[str], None], after: Callable[[], None]
) -> None:
    """Call ``before(name)`` and ``after()`` around the first import of ``names``.

    If these libraries import each other, the outermost import counts: once it is done,
    all libraries are imported. ``after`` is called at once if one of them is already
    imported, and not at all for an import that fails. The import statement raises what
    ``after`` raises.
    """
    if any(name in sys.modules for name in names):
        after()
    else:
        sys.meta_path.insert(0, _ImportHook(names, before, after))


class _ImportHook(MetaPathFinder):
    """A finder that delegates to the others, and wraps the loaders of ``names``."""

    def __init__(
        self,
        names: Sequence[str],
        before: Callable[[str], None],
        after: Callable[[], None],
    ) -> None:
        self._names = frozenset(names)
        self._before = before
        self._after = after
        self._depth = 0

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._watch(fullname, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Loader) -> None:
        """Wrap the loader's ``exec_module`` for one call; the loader itself is kept."""
        execute = loader.exec_module

        def watched(module: ModuleType) -> None:
            vars(loader).pop("exec_module")
            with self._importing(name):
                execute(module)

        vars(loader)["exec_module"] = watched

    @contextmanager
    def _importing(self, name: str) -> Iterator[None]:
        if self._depth == 0:
            self._before(name)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            sys.meta_path.remove(self)
            self._after()

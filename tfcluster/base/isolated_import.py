"""How another interpreter runs a module of this copy of the package.

It may have no tfcluster or another version, and nothing else may become importable: so
only this package is loaded from its location, and sys.path gets no new entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

HOOK_FOLDER = "tfcluster/runtime/site"
"""The hook's folder, relative to the folder that holds the package. It goes on
PYTHONPATH, so that every Python below a task's command imports the hook at start."""

# `-c` puts '' (the working directory) on sys.path; it is removed first, so that nothing
# is imported from there by accident.
_SOURCE = """\
import sys
sys.path[:] = [p for p in sys.path if p]
import importlib, importlib.util
root, module = sys.argv[1:3]
del sys.argv[1:3]
spec = importlib.util.spec_from_file_location(
    "tfcluster", root + "/tfcluster/__init__.py",
    submodule_search_locations=[root + "/tfcluster"])
package = importlib.util.module_from_spec(spec)
sys.modules["tfcluster"] = package
try:
    spec.loader.exec_module(package)
except FileNotFoundError:
    sys.exit("tfcluster: " + root + " is not visible here: if Python runs in a "
             "container, bind this folder into it")
sys.exit(importlib.import_module(module).main(sys.argv[1:]))
"""
# One line, because some interpreter wrappers pass on no argument with a newline.
_LOAD = f"exec({_SOURCE!r})"


def module_argv(
    python: tuple[str, ...],
    module: str,
    *args: str,
    options: Sequence[str] = (),
    root: str = PACKAGE_ROOT,
) -> tuple[str, ...]:
    return (*python, *options, "-c", _LOAD, root, module, *args)

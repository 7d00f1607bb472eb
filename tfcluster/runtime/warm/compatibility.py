"""Checks whether a task may be forked from the warm interpreter. Pure, except that it
lists a folder.

Some settings are read only once, when Python starts or TensorFlow is imported. A task
with other settings needs a fresh interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path

from tfcluster.import_variables import is_read_early


def late_variable(
    changes: Mapping[str, str | None], environ: Mapping[str, str]
) -> str | None:
    """Why ``changes`` are too late for this interpreter; None if they are not."""
    for name, value in changes.items():
        if is_read_early(name) and environ.get(name) != value:
            return f"{name} is read only once, at the start"
    return None


def shadowed_module(folder: str | None, imported: Container[str]) -> str | None:
    """Why a program with modules in ``folder`` would get a wrong module, or None.

    This happens if another module of the same name has already been imported.
    """
    if folder is None:
        return None
    try:
        with os.scandir(folder or ".") as entries:
            names = sorted(map(_module_name, entries))
    except OSError:
        return None
    found = next((name for name in names if name and name in imported), None)
    return found and f"the program's folder contains its own module {found!r}"


def _module_name(entry: os.DirEntry[str]) -> str:
    """The name of the top-level module in a directory entry; empty if it is none."""
    name, _, suffix = entry.name.partition(".")
    if suffix == "py" or suffix.endswith("so"):
        return name
    package = not suffix and (Path(entry.path) / "__init__.py").exists()
    return name if package else ""

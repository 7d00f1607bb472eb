"""Reads requirements files so that they mean the same on hosts that lack them.

Files that a requirements file names are included; its paths inside the working
directory are rewritten relative to the host's working directory. Opens no file itself.

As in pip, `-r` and `-c` are relative to the file that has them, and packages to the
working directory. Packages that are not there are sought beside the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.protocol.wire import WORKDIR

MAX_FILES = 50

_OPTION = re.compile(
    r"(?P<head>\s*(?:(?P<short>-[rcfe])\s*"
    r"|(?P<long>--(?:requirement|constraint|find-links|editable))(?:\s+|\s*=\s*)))"
    r"(?P<quote>[\"']?)(?P<value>(?:(?<=[\"'])[^\"'#]+|[^\s\"'#]+))(?P=quote)"
    r"(?P<rest>(?:[\s#].*)?)"
)
_NESTED = ("-r", "--requirement", "-c", "--constraint")
_EDITABLE = ("-e", "--editable")
_LINKS = ("-f", "--find-links")
_LOCAL = re.compile(
    r"(?P<head>\s*(?:[A-Za-z0-9][\w.\-]*(?:\[[^\]]*\])?\s*@\s*)?)"
    r"(?P<value>(?:file://)?(?:\.{1,2}(?=[/\[\s;#]|$)|/)[^\s;#\[]*"
    r"|(?![a-z+]+://)[^\s;#\[@=<>]+\.(?:whl|zip|tar\.gz|tar\.bz2)"
    r"|\w[^\s;#\[@=<>:]*/[^\s;#\[@:]*)(?P<rest>.*)"
)
_UNUSUAL = re.compile(r"[^\w.\-]")


class RequirementsError(ValueError):
    """The file cannot be used; the message says why."""


@dataclass(slots=True)
class Bundle:
    """A requirements file, with everything that it refers to."""

    files: list[tuple[str, str]] = field(default_factory=list)
    """Names and texts; the first one is the file itself."""
    local: list[Path] = field(default_factory=list)
    """The packages and folders of packages that it refers to."""
    editable: list[Path] = field(default_factory=list)
    """Editable packages, which are imported from their own folders."""


Read = Callable[[Path], str]
Exists = Callable[[Path], bool]


def bundle(path: Path, workdir: Path, read: Read, exists: Exists) -> Bundle:
    """Read ``path`` and what it includes by ``read``. Raises RequirementsError."""
    return _Bundler(workdir, read, exists).bundle(path)


class _Bundler:
    def __init__(self, workdir: Path, read: Read, exists: Exists) -> None:
        self._workdir = workdir
        self._read = read
        self._exists = exists
        self._names: dict[Path, str] = {}
        self._bundle = Bundle()

    def bundle(self, path: Path) -> Bundle:
        if path.name == "pyproject.toml":
            lines = dependencies(self._read(path))
            text = "".join(f"{self._line(line, path.parent)}\n" for line in lines)
            self._bundle.files.append(("requirements.txt", text))
        else:
            self._include(path)
        return self._bundle

    def _include(self, path: Path) -> str:
        """Add the file to the bundle; returns its name there."""
        if path in self._names:
            return self._names[path]
        number = len(self._names)
        if number == MAX_FILES:
            raise RequirementsError(f"more than {MAX_FILES} files include each other")
        name = _UNUSUAL.sub("_", f"{number}-{path.name}" if number else path.name)
        self._names[path] = name
        self._bundle.files.append((name, ""))
        lines = self._read(path).splitlines()
        text = "".join(f"{self._line(line, path.parent)}\n" for line in lines)
        self._bundle.files[number] = (name, text)
        return name

    def _line(self, line: str, folder: Path) -> str:
        option = _OPTION.fullmatch(line)
        if option is not None:
            value, kind = option["value"], option["short"] or option["long"]
            if "://" in value or value.startswith(("git+", "${")):
                return line
            if kind in _NESTED:
                name = self._include(_absolute(value, folder))
                return f"{option['head']}{name}{option['rest']}"
            kept = self._bundle.editable if kind in _EDITABLE else self._bundle.local
            order = (folder, self._workdir) if kind in _LINKS else None
            placed, quote = self._placed(value, folder, kept, order), option["quote"]
            return f"{option['head']}{quote}{placed}{quote}{option['rest']}"
        if line.lstrip().startswith(("-", "#")):
            return line
        local = _LOCAL.fullmatch(line)
        if local is None:
            return line
        value = local["value"]
        scheme = "file://" if value.startswith("file://") else ""
        kept = self._bundle.local
        placed = self._placed(value.removeprefix(scheme), folder, kept)
        return f"{local['head']}{scheme}{placed}{local['rest']}"

    def _placed(
        self,
        value: str,
        folder: Path,
        kept: list[Path],
        order: tuple[Path, Path] | None = None,
    ) -> str:
        """The path as the host finds it; ``order`` has the two folders to search."""
        bare, bracket, extras = value.partition("[")
        first, second = order or (self._workdir, folder)
        path = _absolute(bare, first)
        if not self._exists(path) and self._exists(_absolute(bare, second)):
            path = _absolute(bare, second)
        kept.append(path)
        if path.is_relative_to(self._workdir):
            below = path.relative_to(self._workdir).as_posix()
            shown = WORKDIR if below == "." else f"{WORKDIR}/{below}"
        else:
            shown = str(path)
        return f"{shown}{bracket}{extras}"


def _absolute(text: str, folder: Path) -> Path:
    parts: list[str] = []
    for part in (folder / text).parts:
        if part == "..":
            parts = parts[:1] if len(parts) == 1 else parts[:-1]
        else:
            parts.append(part)
    return Path(*parts)


def dependencies(text: str) -> list[str]:
    """The dependencies of a pyproject.toml. Raises RequirementsError."""
    if sys.version_info >= (3, 11):  # imported here: few configurations need it
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # bad TOML, or a number with thousands of digits
        raise RequirementsError(str(error)) from error
    except RecursionError as error:
        raise RequirementsError("its values are nested too deep") from error
    project: Any = document.get("project")
    if not isinstance(project, dict):
        raise RequirementsError("it has no [project] table")
    dynamic, listed = project.get("dynamic"), project.get("dependencies", [])
    if isinstance(dynamic, list) and "dependencies" in dynamic:
        raise RequirementsError("its dependencies are dynamic: name a file with them")
    if not isinstance(listed, list) or not all(isinstance(x, str) for x in listed):
        raise RequirementsError("its dependencies are not a list of strings")
    return [" ".join(line.split()) for line in listed]

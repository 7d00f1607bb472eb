"""The versions of TensorFlow and Keras that tfcluster is known to work with.

``make compat`` measures the range; docs/compatibility.md has its results.
"""

from __future__ import annotations

import re
import sys

OLDEST = {"tensorflow": (2, 16), "keras": (3, 7)}
NEWEST = {"tensorflow": (2, 21), "keras": (3, 15)}

_TITLES = {"tensorflow": "TensorFlow", "keras": "Keras"}


def imported(package: str) -> str | None:
    """The version of a package that this process has imported, or None."""
    version = getattr(sys.modules.get(package), "__version__", None)
    return None if version is None else str(version)


def described() -> str:
    """The imported versions, such as ``TensorFlow 2.21.0 and Keras 3.15.1``."""
    found = [(title, imported(package)) for package, title in _TITLES.items()]
    return " and ".join(f"{title} {version}" for title, version in found if version)


def known() -> str:
    """The range, such as ``TensorFlow 2.16 to 2.21 and Keras 3.7 to 3.15``."""
    return " and ".join(
        f"{title} {_text(OLDEST[package])} to {_text(NEWEST[package])}"
        for package, title in _TITLES.items()
    )


def are_known() -> bool:
    """Whether each imported package has a version within its range."""
    return all(
        OLDEST[package] <= numbers(version) <= NEWEST[package]
        for package in _TITLES
        if (version := imported(package)) is not None
    )


def too_old(package: str, version: str | None) -> str | None:
    """Why this version of ``tensorflow`` or ``keras`` is refused, or None."""
    if version is None or numbers(version) >= OLDEST[package]:
        return None
    title, oldest = _TITLES[package], _text(OLDEST[package])
    return f"{title} {version} is too old: tfcluster needs {title} {oldest} or newer"


def imported_too_old() -> str | None:
    """The same for what this process has imported."""
    problems = (too_old(package, imported(package)) for package in _TITLES)
    return "; ".join(filter(None, problems)) or None


def numbers(version: str) -> tuple[int, ...]:
    """The major and the minor number of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))

"""The versions of TensorFlow and Keras that tfcluster works with.

``make compat`` runs the tests with them; docs/compatibility.md has the results.
"""

from __future__ import annotations

import re
import sys

OLDEST = {"tensorflow": (2, 16), "keras": (3, 7)}
NEWEST = {"tensorflow": (2, 21), "keras": (3, 15)}
"""The newest versions that the tests have run with."""

_TITLES = {"tensorflow": "TensorFlow", "keras": "Keras"}


def imported(package: str) -> str | None:
    version = getattr(sys.modules.get(package), "__version__", None)
    return None if version is None else str(version)


def too_old(package: str, version: str | None) -> str | None:
    """Why this version of ``tensorflow`` or ``keras`` is refused, or None."""
    if version is None or numbers(version) >= OLDEST[package]:
        return None
    title, oldest = _TITLES[package], _text(OLDEST[package])
    return f"{title} {version} is too old: tfcluster needs {title} {oldest} or newer"


def imported_too_old() -> str | None:
    """Why a version that this process has imported is refused, or None."""
    problems = (too_old(package, imported(package)) for package in _TITLES)
    return "; ".join(filter(None, problems)) or None


def unknown(package: str, version: str | None) -> str | None:
    """What to say about a version newer than all tested versions, or None."""
    if version is None or numbers(version) <= NEWEST[package]:
        return None
    title, newest = _TITLES[package], _text(NEWEST[package])
    return (
        f"{title} {version} is newer than all that tfcluster was tested with, up to "
        f"{title} {newest}: training may differ or fail"
    )


def imported_unknown() -> list[str]:
    """What to say about untested versions that this process has imported."""
    warnings = (unknown(package, imported(package)) for package in _TITLES)
    return [*filter(None, warnings)]


def supported_range(package: str) -> str:
    """The range of versions that are known to work: ``3.7 to 3.15``."""
    return f"{_text(OLDEST[package])} to {_text(NEWEST[package])}"


def requirement(package: str) -> str:
    """The range of versions for pip: ``keras>=3.7,<3.16``."""
    major, minor = NEWEST[package]
    return f"{package}>={_text(OLDEST[package])},<{major}.{minor + 1}"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))

"""Remembers on which hosts interpreters are kept: ``STATE/warm-hosts/*.json``.

Only the hosts know which interpreters they keep.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfcluster.record.files import replace_json
from tfcluster.record.paths import FOLDER_MODE


@dataclass(frozen=True, slots=True)
class WarmHosts:
    """The hosts of a description whose interpreters are kept."""

    purpose: str
    backend: str
    hosts: Mapping[str, Any]
    """How to reach the hosts, as the backend remembers it."""


def save(state: Path, known: WarmHosts) -> None:
    """Remember these hosts. Raises OSError."""
    folder = state / "warm-hosts"
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    parts = {"purpose": known.purpose, "backend": known.backend}
    replace_json(_file(state, known.purpose), {**parts, "hosts": dict(known.hosts)})


def load(state: Path) -> list[WarmHosts]:
    """All hosts that are remembered; files that cannot be read are skipped."""
    found = []
    for path in sorted((state / "warm-hosts").glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            parts = json.loads(path.read_bytes())
            found.append(WarmHosts(parts["purpose"], parts["backend"], parts["hosts"]))
    return found


def forget(state: Path, purpose: str) -> None:
    with suppress(OSError):
        _file(state, purpose).unlink()


def _file(state: Path, purpose: str) -> Path:
    digest = hashlib.sha256(purpose.encode("utf-8", "surrogateescape")).hexdigest()
    return state / "warm-hosts" / f"{digest[:16]}.json"

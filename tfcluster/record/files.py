"""JSON files that are written atomically, so that readers never see half a file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfcluster.protocol.wire import loads
from tfcluster.record.paths import FILE_MODE

_OURS = os.O_CLOEXEC | os.O_NOFOLLOW


def open_private(path: Path, flags: int) -> int:
    """Open a private file that is no link and is not inherited. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | _OURS, FILE_MODE)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in as many system calls as needed. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Replace the file ``path`` with ``value``, see ``replace_file``."""
    text = json.dumps(value, indent=1, default=str) + "\n"
    replace_file(path, text.encode(), durable=durable)


def replace_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace the content of a file atomically. For one writer at a time.

    ``durable`` waits until the content would survive a power cut. Raises OSError, and
    then leaves the old file unchanged.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)  # left by a writer that was killed
    descriptor = open_private(beside, os.O_WRONLY | os.O_EXCL)
    try:
        try:
            write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None if there is no file, or no JSON object in it."""
    try:
        value = loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None

"""JSON files that a reader finds whole or not at all, whoever dies when.

Knows nothing of what they hold.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfcluster.record.paths import FILE_MODE

_OURS = os.O_CLOEXEC | os.O_NOFOLLOW


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that only we can read from its first moment on.

    Never follows a link, and is not inherited by programs.
    """
    return os.open(path, flags | os.O_CREAT | _OURS, FILE_MODE)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, in as many portions as the system asks for."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Put ``value`` in the place of ``path`` in one step. One writer at a time.

    ``durable`` waits until it would survive a power cut. Raises OSError; then the old
    file stands as it was.
    """
    text = json.dumps(value, indent=1, default=str) + "\n"
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)  # of a writer that was killed
    descriptor = open_private(beside, os.O_WRONLY | os.O_EXCL)
    try:
        try:
            write_all(descriptor, text.encode())
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
    """The object that ``path`` holds; None if it is not there or is no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

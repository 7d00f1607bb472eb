"""Notes when each host begins a stage of its start, for the record.

A stage lasts until the next one of the same host, or until the host is ready or has
failed.
"""

from __future__ import annotations

from collections.abc import Callable

CONNECT = "connect"
RESOLVE = "resolve the name"
AGENT = "start the agent"
COPY = "copy files"
PREPARE = "set-up lines"
ENVIRONMENT = "make the environment"
IMPORT = "import TensorFlow"

NoteStage = Callable[[str, str, float | None], None]
"""Called with a host, a stage, and the Unix time when it began (None: now)."""


def not_noted(host: str, stage: str, began_s: float | None) -> None:
    """A ``NoteStage`` for callers that keep no record."""

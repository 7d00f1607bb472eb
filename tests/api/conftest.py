"""Each test has its own state folder, and leaves no process."""

from __future__ import annotations

from tests.launch.conftest import cluster

__all__ = ["cluster"]

"""The cluster of the launch tests, for reports of real runs."""

from __future__ import annotations

from tests.launch.conftest import cluster

__all__ = ["cluster"]

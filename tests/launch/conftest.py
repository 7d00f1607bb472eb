"""Gives each test its own cluster and removes everything that is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_runs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()
    try:
        assert_nothing_runs(cluster)
    finally:
        # The leftovers of a failed test must not disturb other tests.
        for pid in cluster.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

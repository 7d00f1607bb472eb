"""Control groups for single tests, where this machine allows it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.kit.waiting import eventually

CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def pids_group() -> Iterator[Path]:
    """Make a control group that can limit the number of processes."""
    yield from _group("pids", "pids.max")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Make a control group that can limit memory."""
    yield from _group("memory", "memory.limit_in_bytes", "memory.max")


def _empty(procs: Path) -> bool:
    return not procs.read_text()


def _group(controller: str, *files: str) -> Iterator[Path]:
    for parent in (CGROUPS / controller, CGROUPS):
        folder = parent / f"agent-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if any((folder / name).exists() for name in files):
                yield folder
                procs = folder / "cgroup.procs"
                eventually(partial(_empty, procs), "the control group is empty")
                return
        finally:
            folder.rmdir()
    pytest.skip(f"no {controller} control group can be made here (needs root)")

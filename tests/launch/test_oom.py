"""Tests of a task that the kernel kills because memory has run out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.cluster import PYTHON, Cluster, plain
from tests.kit.oracle import assert_nothing_left

LIMIT_BYTES = 200 << 20
_CGROUPS = Path("/sys/fs/cgroup")
# The launcher and the agent are in the group too, but use far less memory.
GREEDY = """
import os, time
if os.environ['TFCLUSTER_RANK'] == '0':
    time.sleep(600)
blocks = [b'x' * 2**24 for _ in range(99)]
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group (version 2 or 1) with a low memory limit."""
    for base, limit, swap, swap_bytes in (
        (_CGROUPS, "memory.max", "memory.swap.max", 0),
        (_CGROUPS / "unified", "memory.max", "memory.swap.max", 0),
        (
            _CGROUPS / "memory",
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
            LIMIT_BYTES,
        ),
    ):
        if not (base / "cgroup.procs").exists() or not os.access(base, os.W_OK):
            continue
        group = base / f"tfcluster-test-{os.getpid()}"
        group.mkdir()
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(LIMIT_BYTES))
                with suppress(OSError):  # kernels without swap lack this limit
                    (group / swap).write_text(str(swap_bytes))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no memory control group can be made here")


def test_the_oom_killer_is_named(cluster: Cluster, group: Path) -> None:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    words = [*plain(count=2), "--", *PYTHON, "-c", GREEDY]
    running = cluster.start(*words, prepare=enter)
    assert running.end() == 1
    report = running.report()
    first = report["first_failure"]
    assert (first["task"], first["signal"]) == ("worker:1", "SIGKILL")
    cause = "killed by SIGKILL: out of memory (the kernel's OOM killer)"
    assert first["cause"] == cause
    assert f"first failure: worker:1 on localhost: {cause}" in running.err
    assert_nothing_left(running)

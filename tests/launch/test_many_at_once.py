"""Tests of many launches at the same time on one machine."""

from __future__ import annotations

import json

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left

LAUNCHES = 20
SCRIPT = 'echo "$TF_CONFIG"; until [ -e "$MEETING" ]; do sleep 0.1; done'


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_launches_at_once_have_ports_of_their_own(cluster: Cluster) -> None:
    meeting = cluster.folder / "meeting"
    options = ("--set", f"env.MEETING={meeting}")
    launches = [cluster.bash(SCRIPT, *options, count=2) for _ in range(LAUNCHES)]
    addresses = []
    for running in launches:
        running.wait_for_text("}}", "worker:0", "worker:1", timeout_s=120)
        config = json.loads(running.text("worker:0"))
        addresses += config["cluster"]["worker"]
    # All of them hold their ports now.
    assert all(running.process.poll() is None for running in launches)
    assert len(set(addresses)) == 2 * LAUNCHES
    meeting.touch()
    for running in launches:
        assert running.end(120) == 0, running.err
    assert_nothing_left(launches[-1])

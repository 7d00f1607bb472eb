"""The host settings that a run saves lead to the same routes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.descriptions import describe
from tfcluster.base.errors import ContactLostError
from tfcluster.plan.model import HostEntry, Ssh
from tfcluster.schedulers.ssh import SCHEDULER
from tfcluster.schedulers.ssh.route import SavedSettings


def _described() -> Any:
    return describe(
        {"worker": 2},
        backend="ssh",
        hosts=(
            HostEntry(host="a", port=7, user="u", slots=2, gpus=1, python=("/p", "x")),
            HostEntry(host="a", port=8),
            HostEntry(host="b", address="10.0.0.2"),
        ),
        ssh=Ssh(identity_file=Path("/k"), config_file=Path("/dev/null")),
        origins={"ssh.connect_timeout": "x:1:1"},
    )


def test_hosts_and_routes_come_back(tmp_path: Path) -> None:
    description, backend = _described(), SCHEDULER
    env = {"HOME": str(tmp_path)}
    found = json.loads(json.dumps(backend.remember(description)))
    hosts, starter = backend.return_to(found, env)
    assert hosts == backend.allocate(description, env).hosts
    assert starter.routes == backend.starter(description, env).routes
    assert [host.name for host in hosts] == ["a:7", "a:8", "b"]


@pytest.mark.parametrize(
    "found", [{}, {"hosts": 1}, {"hosts": [{}], "ssh": {}, "python": "p"}]
)
def test_what_was_not_remembered(found: dict[str, Any]) -> None:
    with pytest.raises(ContactLostError):
        SavedSettings.from_json(found)

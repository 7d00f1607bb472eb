"""The configuration that a run was launched with, and the one after a resize."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.descriptions import describe
from tfcluster.base.errors import ConfigError
from tfcluster.plan.model import Host, Ssh
from tfcluster.record.launched import launched, resized, save_launched, save_resized
from tfcluster.record.paths import RunPaths

HOSTS = (
    Host(name="a:7", hostname="a", port=7, user="u", slots=2, gpus=("0",)),
    Host(name="b", address="10.0.0.2", python=("/p", "x")),
)
DESCRIPTION = describe(
    {"worker": 2},
    backend="ssh",
    hosts=HOSTS,
    ssh=Ssh(identity_file=Path("/k"), config_file=Path("/dev/null")),
    origins={"ssh.connect_timeout": "x:1:1"},
)


def test_both_come_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    save_launched(paths, DESCRIPTION)
    assert launched(paths) == resized(paths) == DESCRIPTION
    larger = replace(DESCRIPTION, hosts=(*HOSTS, Host(name="c")))
    save_resized(paths, larger)
    assert launched(paths) == DESCRIPTION
    assert resized(paths) == larger


def test_the_description_of_a_submission_is_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    save_launched(paths, DESCRIPTION)
    save_launched(paths, replace(DESCRIPTION, hosts=()))
    assert launched(paths) == DESCRIPTION


@pytest.mark.parametrize("text", ["", "{}", '{"description": {"hosts": 1}}'])
def test_a_record_that_does_not_say_it(text: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.launched.write_text(text)
    with pytest.raises(ConfigError):
        launched(paths)

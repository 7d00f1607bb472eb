"""Tests of the warning about ports that are open to all users and hosts."""

from __future__ import annotations

import psutil
import pytest

from tfcluster.launcher.run_output import describe, exposure_warning, reachable


def test_public_addresses_come_first_and_loopback_does_not_count() -> None:
    found = reachable(
        {
            "lo": ["127.0.0.1", "::1"],
            "eth0": ["10.9.0.1", "00:11:22:33:44:55", "fe80::1%eth0"],
            "eth1": ["8.8.4.4", "2001:4860:4860::8888"],
        }
    )
    assert found == ["8.8.4.4 PUBLIC", "2001:4860:4860::8888 PUBLIC", "10.9.0.1"]


@pytest.mark.parametrize(
    ("others", "word"), [(0, "commands from any client (see"), (3, "3")]
)
def test_the_warning_names_ports_addresses_and_users(others: int, word: str) -> None:
    ports = [1, 2, 3, 4, 5, 6, 7]
    text = describe(ports, "localhost, 10.9.0.1", others, anyone=True)
    assert "port 1, 2, 3, 4, 5, 6, ... of localhost, 10.9.0.1" in text
    assert word in text


def test_this_machine_has_what_it_takes() -> None:
    assert exposure_warning([], anyone=True) is None
    said = exposure_warning([40000], anyone=True)
    assert said is not None
    assert "40000" in said
    assert psutil.net_if_addrs()


def test_ports_of_other_machines_are_said_to_be_there() -> None:
    said = exposure_warning([40001, 40000], {"node2", "node1"}, anyone=True)
    assert said is not None
    assert "port 40000, 40001 of node[1-2] and accept commands from any client" in said
    said = exposure_warning([40001], {"node1"}, anyone=False)
    assert said is not None
    assert "port 40001 of node1 and accept commands from every user of these" in said


def test_a_server_that_only_other_users_of_this_machine_reach() -> None:
    text = describe([1], "localhost", 2, anyone=False)
    assert "from every user of this machine; other users are logged in: 2" in text


def test_nobody_is_warned_of_a_server_that_nobody_else_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "users", list)
    assert exposure_warning([40000], anyone=False) is None

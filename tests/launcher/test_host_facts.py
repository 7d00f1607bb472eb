"""Tests of the choice of the address that other hosts use for a host."""

from __future__ import annotations

import pytest

from tfcluster.launcher.host_facts import choose_address, resolve
from tfcluster.model import Host


@pytest.mark.parametrize(
    ("given", "way_in", "local", "resolved", "expected"),
    [
        ("10.0.0.7", "10.0.0.1", ["10.0.0.1"], [], "10.0.0.7"),
        # The host's name itself is given as its address.
        ("h", "10.0.0.1", ["10.0.0.1"], [], "h"),
        (None, "10.0.0.1", ["10.0.0.1", "172.17.0.1"], [], "10.0.0.1"),
        (None, "127.0.0.1", ["10.0.0.1"], [], "10.0.0.1"),
        (None, None, ["172.17.0.1", "10.0.0.1"], ["10.0.0.1"], "10.0.0.1"),
        (None, None, ["10.0.0.1"], ["127.0.1.1"], "10.0.0.1"),
        (None, None, ["fd00::2"], ["::1"], "fd00::2"),
        (None, "", [], ["10.0.0.1"], ""),
    ],
)
def test_the_address_of_one_host_among_several(
    given: str | None,
    way_in: str | None,
    local: list[str],
    resolved: list[str],
    expected: str,
) -> None:
    found = choose_address(
        Host(name="h", address=given),
        way_in=way_in,
        local=local,
        resolved=resolved,
        alone=False,
    )
    assert found == expected


def test_a_host_alone_need_not_be_reached() -> None:
    host = Host(name="h")
    assert (
        choose_address(host, way_in="10.0.0.1", local=[], resolved=[], alone=True)
        == "127.0.0.1"
    )


def test_names_that_mean_nothing() -> None:
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("does-not-exist.invalid") == ()

"""Tests of what hosts tell: addresses, and how their cores are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.descriptions import describe, hosts
from tfcluster.launcher.host_facts import choose_address, resolve, threads_env
from tfcluster.plan.compose import TaskSpec, compose
from tfcluster.plan.model import Allocation, Host
from tfcluster.plan.placement import place
from tfcluster.protocol.wire import INTER_OP_THREADS, INTRA_OP_THREADS


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


def specs(
    workers: int, slots: tuple[int, ...], cpus: dict[str, int]
) -> tuple[TaskSpec, ...]:
    description = describe({"worker": workers, "ps": 1})
    known = [replace(h, cpus=cpus.get(h.name)) for h in hosts(*slots).hosts]
    places = place(description, Allocation(hosts=tuple(known)))
    return compose(description, places, lambda program: False)


@pytest.mark.parametrize(
    ("workers", "slots", "cpus", "expected"),
    [
        (2, (3,), {"h1": 8}, "4"),
        (3, (4,), {"h1": 8}, "2"),
        (3, (4,), {"h1": 2}, "1"),
        (3, (2, 2), {"h1": 8, "h2": 6}, "4"),
        (3, (2, 2), {"h1": 8, "h2": 2}, "2"),
        (2, (1, 2), {"h1": 8, "h2": 8}, None),
        (2, (3,), {"h1": 0}, None),
        (2, (3,), {}, None),
    ],
)
@pytest.mark.parametrize("transport", ["host", "tensorflow"])
def test_all_ranks_have_the_threads_of_the_smallest_share(
    workers: int,
    slots: tuple[int, ...],
    cpus: dict[str, int],
    expected: str | None,
    transport: str,
) -> None:
    found = threads_env(specs(workers, slots, cpus), transport)
    both = len(slots) == 1 and transport == "host"
    names = [INTRA_OP_THREADS, *([INTER_OP_THREADS] if both else [])]
    assert found == ({} if expected is None else dict.fromkeys(names, expected))

"""Ports that are not to be had: nothing is started with an address that is none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.launch.cluster import Cluster, plain
from tests.launch.oracle import assert_nothing_left

COUNT = 3


@pytest.fixture
def taken() -> Iterator[tuple[int, list[socket.socket]]]:
    """The first of some neighbouring ports, and sockets that listen on all of them."""
    with ExitStack() as stack:
        for low in range(41000, 60000, COUNT):
            held = [stack.enter_context(socket.socket()) for _ in range(COUNT)]
            try:
                for number, each in enumerate(held):
                    each.bind(("", low + number))
                    each.listen()
            except OSError:
                continue
            yield low, held
            return


@pytest.mark.parametrize("free", [0, 1])
def test_too_few_free_ports_are_named_before_anything_starts(
    cluster: Cluster, taken: tuple[int, list[socket.socket]], free: int
) -> None:
    low, held = taken
    for each in held[:free]:
        each.close()
    ports = f"ports={low}-{low + COUNT - 1}"
    options = plain("--set", ports, count=2)
    running = cluster.start(*options, "--", "sh", "-c", "echo $TF_CONFIG")
    assert running.end() == 4
    cause = f"only {free} of 2 ports between {low} and {low + COUNT - 1} are free"
    assert cause in running.report()["first_failure"]["cause"]
    assert "'ports'" in running.err
    assert running.out == ""
    assert_nothing_left(running)

"""The formulas of the scaling model."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import scaling
from benchmarks.overlap import HEADERS
from benchmarks.scaling import Costs

# A byte takes 8.4 ns on a wire of 1 Gbit/s, and 1 ns of a core.
COSTS = Costs(
    compute_s=0.1,
    size=1_000_000,
    exchanges=2,
    latency_s=1e-4,
    message_s=1e-5,
    cpu_s_per_byte=1e-9,
)


def test_direct_exchanges_have_two_hops_and_messages_for_all_others() -> None:
    wire_s = 1.5 * 1_000_000 * 8 * HEADERS / 1e9
    expected_s = wire_s + 2 * (2 * 1e-4 + 4 * 1e-5)
    assert scaling.direct_s(COSTS, 4, 1.0) == pytest.approx(expected_s)


def test_a_ring_sends_almost_twice_the_bytes_and_has_two_hops_for_each_other_host() -> (
    None
):
    wire_s = 1.5 * 1_000_000 * 8 * HEADERS / 1e9
    assert scaling.ring_s(COSTS, 4, 1.0) == pytest.approx(wire_s + 2 * 6 * 1e-4)


def test_a_fast_network_leaves_the_cpu_time() -> None:
    assert scaling.ring_s(COSTS, 4, 100.0) == pytest.approx(1.5e-3 + 12e-4)


def test_hops_of_other_algorithms_grow_with_the_logarithm() -> None:
    assert scaling.halving_s(COSTS, 8, 100.0) == pytest.approx(1.75e-3 + 12e-4)
    assert scaling.doubling_s(COSTS, 8, 100.0) == pytest.approx(3e-3 + 6e-4)
    assert scaling.tree_s(COSTS, 8, 100.0) == pytest.approx(6e-3 + 12e-4)


@pytest.mark.parametrize("name", scaling.ALGORITHMS)
def test_a_single_host_exchanges_nothing(name: str) -> None:
    assert scaling.ALGORITHMS[name](COSTS, 1, 1.0) == 0.0


def test_a_step_lies_between_full_overlap_and_none() -> None:
    assert scaling.step_s(COSTS, 0.04) == pytest.approx((0.1, 0.14))
    assert scaling.step_s(COSTS, 0.4) == pytest.approx((0.4, 0.5))


def test_ranks_that_share_cores_take_turns() -> None:
    expected = dataclasses.replace(
        COSTS, compute_s=0.8, latency_s=8e-4, message_s=8e-5, cpu_s_per_byte=8e-9
    )
    shared = COSTS.on_shared_cores(16, 2)
    assert dataclasses.astuple(shared) == pytest.approx(dataclasses.astuple(expected))
    assert COSTS.on_shared_cores(2, 4) == COSTS


def test_the_table_has_each_network() -> None:
    table = scaling.rows(COSTS, [8, 64], [1.0, 10.0])
    assert [cells[:2] for cells in table] == [
        ("8", "1 Gbit/s"),
        ("8", "10 Gbit/s"),
        ("64", "1 Gbit/s"),
        ("64", "10 Gbit/s"),
    ]

"""Tests of the order of task ends on one host, and of their times across hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfcluster.launcher.task_messages import EndOrder


def test_the_number_decides_on_one_host() -> None:
    ends = EndOrder()
    late = ends.at_s("h1", 1, 10.0)
    early = ends.at_s("h1", 0, 10.3)  # reported later because its output was awaited
    assert early < late == 10.0
    assert ends.at_s("h1", 2, 9.9) > late


def test_hosts_have_numbers_of_their_own() -> None:
    ends = EndOrder()
    assert ends.at_s("h1", 5, 10.0) == 10.0
    assert ends.at_s("h2", 0, 11.0) == 11.0


@given(st.permutations(range(8)), st.lists(st.floats(0, 100), min_size=8, max_size=8))
def test_any_order_of_news(numbers: list[int], times: list[float]) -> None:
    ends = EndOrder()
    found = {n: ends.at_s("h", n, s) for n, s in zip(numbers, times, strict=True)}
    assert [n for n, _ in sorted(found.items(), key=lambda item: item[1])] == sorted(
        numbers
    )

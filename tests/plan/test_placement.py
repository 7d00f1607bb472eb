"""The hosts, ranks and GPUs of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.descriptions import describe, hosts
from tfcluster.base.errors import StartError
from tfcluster.plan.model import Allocation, Description, TaskGroup
from tfcluster.plan.placement import Place, place, place_again, share_machines


def where(description: Description, allocation: Allocation) -> dict[str, str]:
    return {str(p.task): p.host.name for p in place(description, allocation)}


def test_ranks_are_the_chief_and_then_the_workers() -> None:
    places = place(describe({"chief": 1, "worker": 2, "ps": 1}), hosts(None))
    assert [(str(p.task), p.rank) for p in places] == [
        ("chief:0", 0),
        ("worker:0", 1),
        ("worker:1", 2),
        ("ps:0", None),
    ]


def test_hosts_without_slots_get_even_blocks_of_ranks_and_of_servers() -> None:
    found = where(describe({"chief": 1, "worker": 3, "ps": 2}), hosts(*[None] * 4))
    assert [found[t] for t in ("chief:0", "worker:0", "worker:1", "worker:2")] == [
        "h1",
        "h2",
        "h3",
        "h4",
    ]
    assert found["ps:0"] != found["ps:1"]


def test_slots_are_filled_in_the_hosts_order() -> None:
    found = where(describe({"chief": 1, "worker": 3, "ps": 1}), hosts(3, 1, 4))
    assert list(found.values()) == ["h1", "h1", "h1", "h2", "h3"]


def test_slots_and_open_hosts_together() -> None:
    found = where(describe({"worker": 6}), hosts(1, None, None))
    assert list(found.values()) == ["h1", "h2", "h2", "h2", "h3", "h3"]


def test_spread_tasks_are_even_blocks_within_the_slots() -> None:
    tasks = {"chief": 1, "worker": 5, "ps": 2}
    found = where(describe({**tasks}, spread=True), hosts(8, 1, 8, None))
    assert list(found.values()) == ["h1", "h1", "h2", "h3", "h3", "h4", "h1", "h4"]
    few = describe({"worker": 4}, spread=True)
    with pytest.raises(StartError, match=r"4 tasks need 4 slots.*h1: 2, h2: 1"):
        place(few, hosts(2, 1))


def test_too_few_slots_name_what_each_host_has() -> None:
    with pytest.raises(StartError, match=r"5 tasks need 5 slots.*h1: 2, h2: 1"):
        place(describe({"worker": 4, "ps": 1}), hosts(2, 1))


def test_local_and_cross_ranks() -> None:
    places = place(describe({"chief": 1, "worker": 4, "ps": 1}), hosts(2, 3, 1))
    got = [
        (p.local_rank, p.local_size, p.cross_rank, p.cross_size)
        for p in places
        if p.rank is not None
    ]
    assert got == [
        (0, 2, 0, 2),
        (1, 2, 1 - 1, 2),
        (0, 3, 1, 2),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
    ]
    assert places[-1].local_rank is None


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(0, 5),
)
def test_every_task_has_one_place_and_no_host_too_many(
    slots: list[int | None], workers: int, ps: int
) -> None:
    tasks: dict[str, int | TaskGroup] = {"worker": workers}
    if ps:
        tasks["ps"] = ps
    allocation = hosts(*slots)
    try:
        found = where(describe(tasks), allocation)
    except StartError:
        assert None not in slots
        assert sum(s or 0 for s in slots) < workers + ps
        return
    assert len(found) == workers + ps
    for host, limit in zip(allocation.hosts, slots, strict=True):
        if limit is not None:
            assert list(found.values()).count(host.name) <= limit
    ranked = [h for task, h in found.items() if task.startswith("worker")]
    assert ranked == sorted(ranked)  # blocks, in the hosts' order (fewer than ten)


# --- GPUs -----------------------------------------------------------------------------


def gpus(description: Description, allocation: Allocation) -> dict[str, object]:
    return {str(p.task): p.gpus for p in place(description, allocation)}


def test_gpus_are_shared_evenly_and_servers_get_none() -> None:
    found = gpus(describe({"chief": 1, "worker": 1, "ps": 1}), hosts(None, gpus=4))
    assert found == {
        "chief:0": ("0", "1"),
        "worker:0": ("2", "3"),
        "ps:0": (),
    }


def test_tasks_take_turns_where_there_are_fewer_gpus() -> None:
    found = gpus(describe({"worker": 3}), hosts(None, gpus=2))
    assert list(found.values()) == [("0",), ("1",), ("0",)]


def test_wanted_gpus_come_first() -> None:
    tasks: dict[str, int | TaskGroup] = {
        "chief": 1,
        "worker": TaskGroup(count=1, gpus=3),
    }
    found = gpus(describe(tasks), hosts(None, gpus=4))
    assert found == {"chief:0": ("3",), "worker:0": ("0", "1", "2")}


def test_the_schedulers_own_names_of_gpus_are_kept() -> None:
    from tfcluster.plan.model import Host

    host = Host(name="h", address="h", gpus=("GPU-aa", "GPU-bb"))
    found = gpus(describe({"worker": 2}), Allocation(hosts=(host,)))
    assert list(found.values()) == [("GPU-aa",), ("GPU-bb",)]


def test_a_host_without_known_gpus_is_left_alone() -> None:
    found = gpus(describe({"worker": 2, "ps": 1}), hosts(None))
    assert found == {"worker:0": None, "worker:1": None, "ps:0": ()}


@pytest.mark.parametrize("have", [None, 1])
def test_gpus_that_are_not_there_are_refused(have: int | None) -> None:
    description = describe({"worker": TaskGroup(count=2, gpus=1)})
    with pytest.raises(StartError, match="need 2 GPUs"):
        place(description, hosts(None, gpus=have))


# --- again, on fewer hosts ------------------------------------------------------------


def again(description: Description, *slots: int | None, left: str) -> dict[str, str]:
    places = place(description, hosts(*slots))
    smaller, found = place_again(description, places, left.split())
    assert [each.task for each in found] == [*smaller.task_ids()]
    assert [p.rank for p in found if p.task.ranked] == [
        *range(sum(p.task.ranked for p in found))
    ]
    return {str(each.task): each.host.name for each in found}


def test_workers_move_up_when_a_host_is_lost() -> None:
    four = describe({"chief": 1, "worker": 3})
    assert again(four, 1, 1, 1, 1, left="h1 h3 h4") == {
        "chief:0": "h1",
        "worker:0": "h3",
        "worker:1": "h4",
    }
    assert again(four, 1, 1, 1, 1, left="h2 h3") == {"chief:0": "h2", "worker:0": "h3"}
    assert again(four, 1, 1, 1, 1, left="h4") == {"chief:0": "h4"}


def test_each_host_keeps_its_number_of_tasks() -> None:
    six = describe({"worker": 6})
    assert list(again(six, 1, 3, 2, left="h2 h3").values()) == ["h2"] * 3 + ["h3"] * 2


def test_tasks_that_do_not_train_stay_where_they_are() -> None:
    cluster = describe({"chief": 1, "worker": 3, "evaluator": 1})
    assert again(cluster, 2, 2, 1, left="h2 h3") == {
        "chief:0": "h2",
        "worker:0": "h2",
        "evaluator:0": "h3",
    }


def test_each_gpu_still_has_one_task() -> None:
    cluster = describe({"chief": 1, "worker": 3, "evaluator": TaskGroup(gpus=1)})
    places = place(cluster, hosts(2, 3, gpus=3))
    _, found = place_again(cluster, places, {"h2"})
    gpus = {str(each.task): each.gpus for each in found}
    before = next(each.gpus for each in places if each.task.type == "evaluator")
    assert before is not None
    assert gpus["evaluator:0"] == before
    assert {*(gpus["chief:0"] or ()), *(gpus["worker:0"] or ())} == {
        "0",
        "1",
        "2",
    } - {*before}


def test_gpus_that_become_known_later_are_shared_out_alike() -> None:
    cluster = describe({"chief": 1, "worker": 3, "ps": 1})
    known = place(cluster, hosts(3, 2, gpus=4))
    unknown = place(cluster, hosts(3, 2))
    assert [each.gpus for each in unknown] == [None] * 4 + [()]
    asked = [
        replace(each, host=other.host)
        for each, other in zip(unknown, known, strict=True)
    ]
    assert share_machines(cluster, asked) == known


def on_one_machine(places: Sequence[Place], *names: str) -> list[Place]:
    return [
        replace(each, host=replace(each.host, machine=names[0]))
        if each.host.name in names
        else each
        for each in places
    ]


def test_a_machine_under_two_names_is_one() -> None:
    cluster = describe({"worker": 5})
    places = place(cluster, hosts(2, 1, 2, gpus=2))
    found = share_machines(cluster, on_one_machine(places, "h1", "h3"))
    assert [(p.host.name, p.gpus) for p in found] == [
        ("h1", ("0",)),
        ("h1", ("1",)),
        ("h2", ("0", "1")),
        ("h3", ("0",)),
        ("h3", ("1",)),
    ]
    assert [(p.local_rank, p.local_size) for p in found] == [
        (0, 4),
        (1, 4),
        (0, 1),
        (2, 4),
        (3, 4),
    ]
    assert [(p.cross_rank, p.cross_size) for p in found] == [
        (0, 2),
        (0, 1),
        (1, 2),
        (0, 1),
        (0, 1),
    ]


def test_a_machine_under_two_names_has_its_gpus_once() -> None:
    cluster = describe({"worker": TaskGroup(count=2, gpus=2)})
    places = place(cluster, hosts(1, 1, gpus=2))
    with pytest.raises(StartError, match="h1: its tasks need 4 GPUs, but it has 2"):
        share_machines(cluster, on_one_machine(places, "h1", "h2"))


def test_no_gpus_are_wanted_where_they_are_unknown() -> None:
    found = gpus(describe({"worker": TaskGroup(gpus=0)}), hosts(None))
    assert found == {"worker:0": ()}


def test_a_gpu_of_another_task_is_taken_on_its_own_host_only() -> None:
    cluster = describe({"worker": 3, "evaluator": TaskGroup(gpus=1)})
    places = place(cluster, hosts(2, 2, gpus=2))
    _, found = place_again(cluster, places, {"h1", "h2"})
    assert [each.gpus for each in found] == [("0",), ("1",), ("1",), ("0",)]

"""What ``transport: auto`` stands for, from the places of the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.descriptions import describe
from tfcluster.plan.compose import (
    ALLOW_GROWTH,
    Choice,
    TaskSpec,
    chosen_transport,
    compose,
    place_specs,
)
from tfcluster.plan.model import (
    Allocation,
    Description,
    Host,
    Runtime,
    Strategy,
)
from tfcluster.plan.placement import place, share_machines

AUTO = Runtime()


def hosts(**gpus: tuple[str, ...] | None) -> tuple[Host, ...]:
    return tuple(Host(name=name, gpus=found) for name, found in gpus.items())


def choice(described: Description, *found: Host) -> Choice:
    places = place(described, Allocation(hosts=found))
    return chosen_transport(described.runtime, places)


def ranks(count: int, runtime: Runtime = AUTO) -> Description:
    return replace(describe({"worker": count}), runtime=runtime)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({"a": ("0", "1")}, "tensorflow: each rank has a GPU to itself"),
        ({"a": ("0",), "b": ("0",)}, "tensorflow: each rank has a GPU to itself"),
        ({"a": ("0",)}, "host: worker:0 and worker:1 share GPU 0 of a"),
        ({"a": ()}, "host: worker:0 has no GPU"),
        ({"a": ("0", "1"), "b": ()}, "host: worker:1 has no GPU"),
        ({"a": None}, "auto: the GPUs of the hosts are not known yet"),
        ({"a": ("0",), "b": None}, "auto: the GPUs of the hosts are not known yet"),
        ({"a": None, "b": ()}, "host: worker:1 has no GPU"),
    ],
)
def test_each_rank_needs_a_gpu_to_itself(
    gpus: dict[str, tuple[str, ...] | None], expected: str
) -> None:
    found = choice(ranks(2), *hosts(**gpus))
    assert f"{found.transport}: {found.reason}" == expected


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        (Runtime(transport="host"), "host"),
        (Runtime(transport="tensorflow"), "tensorflow"),
        (Runtime(transport="mpi"), "mpi"),
        (Runtime(compression="bf16"), "tensorflow"),
        (Runtime(compression="bf16", error_feedback=True), "host"),
        (Runtime(shards=4), "host"),
        (Runtime(strategy=Strategy.LOCAL_SGD), "host"),
        (Runtime(strategy=Strategy.NONE), "host"),
    ],
)
def test_other_options_may_rule_it_out(runtime: Runtime, expected: str) -> None:
    found = choice(ranks(2, runtime), *hosts(a=("0", "1")))
    assert found.transport == expected


def test_one_rank_exchanges_nothing() -> None:
    assert choice(ranks(1), *hosts(a=("0", "1"))).transport == "host"


def told(specs: tuple[TaskSpec, ...]) -> list[bool]:
    return [spec.has_own_gpu for spec in specs]


def test_all_ranks_are_told_or_none() -> None:
    two, wanted = hosts(a=("0",), b=("0",)), ranks(2)
    specs = compose(wanted, place(wanted, Allocation(hosts=two)), lambda _: True)
    assert told(specs) == [True, True]
    assert all(spec.own_env["TFCLUSTER_OWN_GPUS"] == "1" for spec in specs)
    # The hosts turn out to be one machine with one GPU.
    places = [spec.place for spec in specs]
    same = [replace(p, host=replace(p.host, machine="a")) for p in places]
    shared = share_machines(wanted, same)
    assert told(place_specs(AUTO, specs, shared)) == [False, False]


def growing(specs: tuple[TaskSpec, ...]) -> list[str | None]:
    return [spec.own_env.get(ALLOW_GROWTH) for spec in specs]


def test_tasks_that_share_a_gpu_take_its_memory_in_parts() -> None:
    three, wanted = hosts(a=("0",), b=("0",)), ranks(3)
    specs = compose(wanted, place(wanted, Allocation(hosts=three)), lambda _: True)
    assert [spec.place.host.name for spec in specs] == ["a", "a", "b"]
    assert growing(specs) == ["true", "true", None]
    # The hosts turn out to be one machine with two GPUs; a GPU more, and none share.
    for gpus, expected in (
        (("0", "1"), ["true", None, "true"]),
        (("0", "1", "2"), [None, None, None]),
    ):
        found = [
            replace(spec.place, host=replace(spec.place.host, gpus=gpus, machine="a"))
            for spec in specs
        ]
        places = share_machines(wanted, found)
        assert growing(place_specs(AUTO, specs, places)) == expected


def test_the_users_own_choice_of_gpu_memory_is_kept() -> None:
    wanted = replace(ranks(2), env={ALLOW_GROWTH: "false"})
    places = place(wanted, Allocation(hosts=hosts(a=("0",))))
    specs = compose(wanted, places, lambda _: True)
    assert growing(specs) == [None, None]
    assert specs[0].shared_env[ALLOW_GROWTH] == "false"


def test_nothing_is_told_if_the_transport_is_configured() -> None:
    wanted = ranks(2, Runtime(transport="tensorflow"))
    places = place(wanted, Allocation(hosts=hosts(a=("0", "1"))))
    assert told(compose(wanted, places, lambda _: True)) == [False, False]

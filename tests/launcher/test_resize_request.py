"""Which job a request to resize leads to, and every reason against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.descriptions import describe
from tfcluster.base.errors import ConfigError
from tfcluster.commands.launcher_requests import resize_request
from tfcluster.launcher.job import Job
from tfcluster.launcher.launch import prepare
from tfcluster.launcher.resizer import Wanted, plan_resize
from tfcluster.plan.model import Allocation, Host, Restart, TaskGroup
from tfcluster.protocol.commands import NewHost, ResizeCommand

ALIVE = ("h1", "h2")


def job(
    tasks: dict[str, Any] | None = None,
    hosts: tuple[Host, ...] = (Host(name="h1"), Host(name="h2")),
    **keys: Any,
) -> Job:
    described = describe(tasks or {"worker": 4}, **{"backend": "ssh", **keys})
    prepared = prepare(described, Allocation(hosts=hosts))
    return Job(
        run="r",
        description=described,
        allocation=prepared.allocation,
        specs={spec.task: spec for spec in prepared.specs},
        secrets={},
        token="0",
        logs=Path("/logs"),
    )


def asked(
    before: Job,
    *names: str,
    workers: int | None = None,
    slots: int | None = None,
    alive: tuple[str, ...] = ALIVE,
) -> Wanted | list[str]:
    """The answer to a request for this number and these new hosts."""
    hosts = tuple(NewHost(name, slots) for name in names)
    request = ResizeCommand(workers, hosts, now=False)
    return plan_resize(before, alive, request)


def spread(found: Wanted | list[str]) -> dict[str, int]:
    assert isinstance(found, Wanted), found
    hosts = found.job.used_hosts()
    return {host.name: len(found.job.on_host(host)) for host in hosts}


def test_workers_are_spread_over_the_hosts() -> None:
    assert spread(asked(job(), workers=7)) == {"h1": 4, "h2": 3}
    assert spread(asked(job(), workers=2)) == {"h1": 1, "h2": 1}


def test_a_new_host_gets_as_many_as_the_others_or_its_slots() -> None:
    more = asked(job(), "h3")
    assert spread(more) == {"h1": 2, "h2": 2, "h3": 2}
    assert isinstance(more, Wanted)
    assert more.new == ("h3",)
    assert [e.name for e in more.job.description.hosts] == ["h3"], "it is remembered"
    slots = asked(job(), "h3", slots=1)
    assert spread(slots) == {"h1": 2, "h2": 2, "h3": 1}


def test_a_lost_host_gets_its_place_back() -> None:
    three = tuple(Host(name=name) for name in ("h1", "h2", "h3"))
    before = job({"worker": 3}, three)
    left = before.on_fewer(("h1", "h3"))
    back = asked(left, "h2", workers=3, alive=("h1", "h3"))
    assert isinstance(back, Wanted)
    assert [host.name for host in back.job.used_hosts()] == ["h1", "h2", "h3"]
    places = {str(t): s.place.host.name for t, s in back.job.specs.items()}
    assert places == {"worker:0": "h1", "worker:1": "h2", "worker:2": "h3"}


def test_other_tasks_keep_their_places() -> None:
    before = job({"chief": 1, "worker": 3, "evaluator": 1})
    found = asked(before, workers=5)
    assert isinstance(found, Wanted)
    for task, spec in before.specs.items():
        if not task.ranked:
            assert found.job.specs[task].place.host.name == spec.place.host.name


@pytest.mark.parametrize(
    ("backend", "workers", "names", "reasons"),
    [
        ("ssh", 4, (), ["there are 4 workers already"]),
        ("ssh", 0, (), ["0 is not a number of workers"]),
        ("ssh", None, ("h2",), ["h2 is a host of the run already"]),
        ("ssh", None, ("-x", ""), ["'-x'", "'' is not a host name"]),
        (
            "local",
            0,
            ("a", "b"),
            ["a: backend local", "b: backend local", "0 is not a number"],
        ),
        ("slurm", None, ("a",), ["a: the job does not have"]),
        ("ssh", 1, ("a",), ["a: no task would run there"]),
    ],
)
def test_reasons_against_it(
    backend: str, workers: int | None, names: tuple[str, ...], reasons: list[str]
) -> None:
    found = asked(job(backend=backend), *names, workers=workers)
    assert isinstance(found, list)
    assert len(found) == len(reasons), found
    for reason, said in zip(reasons, found, strict=True):
        assert reason in said


def test_more_workers_than_slots() -> None:
    before = job(hosts=(Host(name="h1", slots=2), Host(name="h2", slots=2)))
    found = asked(before, workers=5)
    assert isinstance(found, list)
    assert "5 tasks need 5 slots, but the hosts have 4" in found[0]


def test_the_least_number_holds() -> None:
    group = {"worker": TaskGroup(count=4, min=3)}
    found = asked(job(group, restart=Restart(max=1)), workers=2)
    assert found == ["2 workers are fewer than 'min' (3)"]
    alone = replace(Restart(max=1), scope="task")
    found = asked(job(restart=alone), workers=2)
    assert found == ["its tasks do not restart together (restart.scope is task)"]


def test_the_words_of_the_command() -> None:
    run, request = resize_request(
        ["digits", "worker=8", "hosts+=n[1-2]:4", "hosts+=x"], now=True
    )
    assert run == "digits"
    hosts = NewHost("n1", 4), NewHost("n2", 4), NewHost("x", None)
    assert request == ResizeCommand(8, hosts, now=True)
    assert resize_request(["worker=2"], now=True)[0] is None
    with pytest.raises(ConfigError):
        resize_request(["digits"], now=True)
    with pytest.raises(ConfigError) as caught:
        resize_request(["worker=1", "worker=2", "gpus=3", "chief=2"], now=True)
    assert len(caught.value.problems) == 3

"""The order of changes: the chief waits until others have made theirs, or cannot."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tfcluster.runtime.files.order import Order

DEADLINE_S = 30.0


def _other_rank(path: str, commands: Connection) -> None:
    order = Order(path, 1, 2)
    order.begin(is_able=True)
    acts: dict[str, Callable[[], None]] = {
        "done": order.done,
        "point": order.pass_point,
        "exchange": lambda: order.enter_exchange(1, 2),
        "foreign": lambda: order.enter_exchange(1, 3),
        "end": order.end,
    }
    while (command := commands.recv()) != "exit":
        if command == "change":
            order.count += 1
        else:
            acts[command]()
        commands.send("ok")


class Other:
    """Another rank, in a process of its own."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self.process = context.Process(target=_other_rank, args=(path, theirs))
        self.process.start()

    def does(self, *commands: str) -> None:
        for command in commands:
            self._end.send(command)
            assert self._end.poll(DEADLINE_S)
            self._end.recv()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[Order, Other]]:
    path = str(tmp_path / "order")
    other = Other(path)
    chief = Order(path, 0, 2)
    assert chief.begin(is_able=True)
    chief.count = 1
    yield chief, other
    other.process.kill()
    other.process.join()


def test_a_change_of_the_other_rank_ends_the_wait(ranks: tuple[Order, Other]) -> None:
    chief, other = ranks
    later = threading.Thread(target=other.does, args=("change", "foreign", "done"))
    later.start()
    assert chief.wait()
    later.join(DEADLINE_S)


@pytest.mark.parametrize("where", ["point", "exchange", "end"])
def test_a_rank_that_is_ahead_cannot_make_the_change(
    ranks: tuple[Order, Other], where: str
) -> None:
    chief, other = ranks
    later = threading.Thread(target=other.does, args=(where,))
    later.start()
    assert not chief.wait()
    later.join(DEADLINE_S)


def test_a_rank_that_has_died_is_not_waited_for(ranks: tuple[Order, Other]) -> None:
    chief, other = ranks
    other.process.kill()
    assert not chief.wait()


def test_changes_before_a_point_are_made(ranks: tuple[Order, Other]) -> None:
    chief, other = ranks
    other.does("change", "point")
    assert chief.wait()

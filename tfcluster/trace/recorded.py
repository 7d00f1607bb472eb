"""What a task has recorded of itself, as spans. Pure.

``docs/record.md`` ("Traces") describes the lines. Any line may be torn or wrong; it is
left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tfcluster.trace.host_clock import HostClock
from tfcluster.trace.spans import Item, Moment, Span

_STEPS = "steps"


def recorded(lines: Iterable[bytes], clocks: dict[str, HostClock]) -> Iterator[Item]:
    """The items of a task's files, whose lines are in order, and gaps in them."""
    expected: tuple[object, int] = None, 0
    for line in lines:
        try:
            batch = json.loads(line)
            attempt, first, last = batch["attempt"], batch["first"], batch["last"]
            clock = clocks.get(batch["host"])
            items = [] if clock is None else list(_items(batch, clock))
            missing = first - expected[1] if expected[0] == attempt else 0
            expected = attempt, last + 1
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            continue
        if missing > 0 and items:
            at_us = items[0].began_us
            yield Moment(_STEPS, f"{missing} events are missing", at_us)
        yield from items


def _items(batch: dict[str, Any], clock: HostClock) -> Iterator[Span]:
    names, base_us = batch["names"], batch["base_us"]
    for row, name, began_us, duration_us, *rest in json.loads(batch["events"]):
        began_us += base_us
        yield Span(
            str(names[row]),
            str(names[name]),
            clock.ours_us(began_us),
            clock.ours_us(began_us + duration_us),
            _args(str(names[row]), [str(each) for each in names], *rest),
        )


def _args(
    row: str,
    names: list[str],
    amount: int = 0,
    how: int | None = None,
    waited_us: int = 0,
    arrived_us: int = 0,
) -> dict[str, object]:
    if how is None:
        key = "step" if row == _STEPS else "exchanges"
        return {key: amount} if amount else {}
    args: dict[str, object] = {"bytes": amount, "transport": names[how]}
    if arrived_us:
        args["arrived_ms"] = arrived_us / 1000
    args["waited_ms"] = waited_us / 1000
    return args

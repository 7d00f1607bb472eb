"""A task's own trace events, as spans. Pure.

``docs/record.md`` ("Traces") describes the lines. Incomplete and invalid lines are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tfcluster.protocol.wire import loads
from tfcluster.trace.host_clock import HostClock
from tfcluster.trace.spans import Item, Moment, Span

_STEPS = "steps"
_MOST = 1 << 53
"""Viewers read numbers as doubles, which are not exact above this."""


def recorded(lines: Iterable[bytes], clocks: dict[str, HostClock]) -> Iterator[Item]:
    """The items in a task's files, whose lines are in order, and the gaps in them."""
    expected: tuple[object, int] = None, 0
    for line in lines:
        try:
            batch = loads(line)
            attempt = batch["attempt"]
            first, last = _whole(batch["first"]), _whole(batch["last"])
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
    names, base_us = [str(each) for each in batch["names"]], batch["base_us"]
    for row, name, after_us, duration_us, *rest in loads(batch["events"].encode()):
        # An event that contains the first event began before it.
        began_us = _whole(base_us + after_us)
        yield Span(
            names[_whole(row)],
            names[_whole(name)],
            clock.ours_us(began_us),
            clock.ours_us(began_us + _whole(duration_us)),
            _args(names[row], names, *map(_whole, rest)),
        )


def _whole(value: Any) -> int:
    """``value`` if it is a number that a task may send. Raises ValueError."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value


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

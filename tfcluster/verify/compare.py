"""Compares two recordings of the same program, one event after another. Pure.

Arrays are compared relative to their largest absolute value (docs/equality.md), losses
and metrics relative to themselves. Up to the noise of one process, values are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from tfcluster.verify.noise import Noise
from tfcluster.verify.recorded import Recorded, RecordedEvent

if TYPE_CHECKING:
    import numpy.typing as npt

_FLOOR = 1e-2
"""Arrays are compared relative to at least this part of the largest array."""
_KINDS = {
    "learning_rate": "learning rate",
    "weight": "weight",
    "state": "state of a layer",
    "slot": "optimizer's variable",
}
_LOGS = {
    "batch": "in the logs of a batch",
    "epoch": "in the logs of an epoch",
    "evaluate": "in the result of evaluate",
    "train_on_batch": "in the result of train_on_batch",
    "test_on_batch": "in the result of test_on_batch",
    "run": "fetched from a session",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    step: int
    """The number of steps before it; 0: before the first step ended; -1: at the end."""
    kind: str
    """learning_rate | weight | state | slot | logs | run | course | file | printed"""
    name: str
    alone: float | None = None
    """The value of the element that differs most, or of the loss or metric."""
    ranks: float | None = None
    relative: float | None = None
    """The difference, relative to the largest value of the array."""
    of_noise: float | None = None
    """The difference, divided by the noise of one process."""
    factor: float | None = None
    """The change on the ranks divided by the change alone, if equal everywhere."""

    @property
    def at_the_end(self) -> bool:
        """Whether files or printed text differ."""
        return self.kind in ("file", "printed")

    def words(self) -> str:
        """``weight dense/kernel after step 3: 0.25 alone, 0.5 on the ranks``."""
        where = f"after step {self.step}" if self.step else "before the first step"
        if self.at_the_end:
            return self.name
        if self.kind == "course":
            return f"{self.name} {where}"
        kind = _KINDS.get(self.kind, "")
        name = kind if self.name == self.kind else f"{kind} {self.name}".strip()
        values = f"{self.alone:.7g} alone, {self.ranks:.7g} on the ranks"
        return f"{name} {where}: {values}"


@dataclass(slots=True)
class Quantity:
    kind: str
    compared: int = 0
    largest: float = 0.0
    of_noise: float = 0.0
    """The largest difference, divided by the noise of its value."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result: the first difference, or None, and the largest difference by kind."""

    steps: int
    first: Difference | None
    quantities: tuple[Quantity, ...]

    @property
    def largest(self) -> float:
        return max((q.largest for q in self.quantities), default=0.0)

    @property
    def of_noise(self) -> float:
        """The largest part of the noise that a value differs by."""
        return max((q.of_noise for q in self.quantities), default=0.0)


def compare(alone: Recorded, ranks: Recorded, noise: Noise) -> Comparison:
    """Compare until the first difference that exceeds ``noise``."""
    return _Comparing(noise).all(alone, ranks)


def noise_of(alone: Recorded, again: Recorded, floor: float) -> Noise:
    """What two runs of one process differ by, as far as they take the same course."""
    noise = Noise(floor)
    _Comparing(Noise(float("inf")), measured=noise).all(alone, again)
    return noise


@dataclass(slots=True)
class _Comparing:
    """One comparison; adds all differences to ``measured``, if given."""

    noise: Noise
    measured: Noise | None = None
    totals: dict[str, Quantity] = field(default_factory=dict)
    steps: int = 0

    def all(self, alone: Recorded, ranks: Recorded) -> Comparison:
        first = self._events(alone.events, ranks.events)
        if first is None:
            first = self._fetched(alone.runs, ranks.runs)
        return Comparison(self.steps, first, tuple(self.totals.values()))

    def _events(
        self, alone: Sequence[RecordedEvent], ranks: Sequence[RecordedEvent]
    ) -> Difference | None:
        before: dict[int, RecordedEvent] = {}
        for one, other in zip_longest(alone, ranks):
            if (
                one is None
                or other is None
                or (one.kind, one.of) != (other.kind, other.of)
            ):
                return _other_course(one, other, self.steps)
            if one.kind == "step":
                difference = self._step(one, other, before.get(one.of))
                before[one.of] = one
                self.steps += 1
            else:
                difference = self._logs(one, other, self.steps)
            if difference is not None:
                return difference
        return None

    def _fetched(
        self, alone: Sequence[RecordedEvent], ranks: Sequence[RecordedEvent]
    ) -> Difference | None:
        """The first difference in what sessions returned, as far as both runs went.

        It is compared after all steps: a worker may fetch the loss of its own rows
        although all weights are equal.
        """
        for one, other in zip(alone, ranks, strict=False):
            difference = self._logs(one, other, one.after_steps)
            if difference is not None:
                return difference
        return None

    def _of_noise(
        self, kind: str, value: Hashable, step: int, relative: float, count: int
    ) -> float:
        """Count values that differ by ``relative``; above 1, they are different."""
        noise = self.noise.of(value, step)
        part = 0.0 if noise == float("inf") else relative / noise
        total = self.totals.setdefault(kind, Quantity(kind))
        total.compared += count
        total.largest = max(total.largest, relative)
        total.of_noise = max(total.of_noise, part)
        if self.measured is not None:
            self.measured.add(value, step, relative)
        return part

    def _step(
        self, one: RecordedEvent, other: RecordedEvent, before: RecordedEvent | None
    ) -> Difference | None:
        """The first difference, in the order learning rate, weights, states, slots."""
        step = self.steps + 1
        mine, theirs = one.arrays(), other.arrays()
        by_name = dict(zip(other.names, theirs, strict=True))
        if len(by_name) != len(theirs):
            by_name = {}  # the names are not distinct; the arrays have the same order
        floors = _floors(one, mine)
        for index, (kind, name) in enumerate(one.names):
            if by_name and (kind, name) in by_name:
                array = by_name[kind, name]
            elif index < len(theirs) and other.names[index][0] == kind:
                array = theirs[index]
            else:
                if kind == "slot":
                    continue  # the array is on a ps
                text = f"{_KINDS[kind]} {name} exists only alone"
                return Difference(step=step, kind="course", name=text)
            relative, at = array_difference(mine[index], array, floors.get(kind, 0.0))
            size = int(mine[index].size)
            part = self._of_noise(kind, (one.of, index), step, relative, size)
            if part > 1:
                earlier = before.arrays()[index] if before is not None else None
                return Difference(
                    step=step,
                    kind=kind,
                    name=name,
                    alone=float(mine[index].flat[at]),
                    ranks=float(array.flat[at]) if array.size > at else None,
                    relative=relative,
                    of_noise=part,
                    factor=_factor(earlier, mine[index], array),
                )
        return None

    def _logs(
        self, one: RecordedEvent, other: RecordedEvent, step: int
    ) -> Difference | None:
        for name in dict.fromkeys([*one.logs, *other.logs]):
            mine, theirs = one.logs.get(name), other.logs.get(name)
            words = f"{name!r} {_LOGS.get(one.kind, '')}".strip()
            if mine is None or theirs is None:
                where = "alone" if theirs is None else "on the ranks"
                return Difference(
                    step=step,
                    kind="course",
                    name=f"{words} exists only {where}",
                    alone=mine,
                    ranks=theirs,
                )
            relative = _relative(mine, theirs)
            kind = "run" if one.kind == "run" else "logs"
            # Metrics that count rows move by whole rows, at other steps in each run.
            part = self._of_noise(kind, (kind, one.of), step, relative, 1)
            if part > 1:
                return Difference(
                    step=step,
                    kind=kind,
                    name=words,
                    alone=mine,
                    ranks=theirs,
                    relative=relative,
                    of_noise=part,
                )
        return None


def _other_course(
    one: RecordedEvent | None, other: RecordedEvent | None, steps: int
) -> Difference:
    def words(event: RecordedEvent | None) -> str:
        if event is None:
            return "the program ended"
        if event.kind == "step":
            return f"optimizer {event.of} made a step"
        return f"model {event.of} reported {event.kind}"

    name = f"alone {words(one)}, but on the ranks {words(other)},"
    return Difference(step=steps, kind="course", name=name)


def _floors(event: RecordedEvent, arrays: list[npt.NDArray[Any]]) -> dict[str, float]:
    """By kind, the smallest value to compare with, above rounding errors."""
    import numpy as np

    floors: dict[str, float] = {}
    for (kind, _), array in zip(event.names, arrays, strict=True):
        if array.dtype.kind == "f" and array.size:
            largest = float(np.nanmax(np.abs(array))) * _FLOOR
            floors[kind] = max(floors.get(kind, 0.0), largest)
    return floors


def array_difference(
    mine: npt.NDArray[Any], theirs: npt.NDArray[Any], floor: float = 0.0
) -> tuple[float, int]:
    """The largest difference relative to the largest value, and its index."""
    import numpy as np

    if mine.shape != theirs.shape:
        return float("inf"), 0
    if mine.size == 0:
        return 0.0, 0
    one, other = mine.astype(np.float64), theirs.astype(np.float64)
    equal = (one == other) | (np.isnan(one) & np.isnan(other))
    if equal.all():
        return 0.0, 0
    gap = np.where(equal, 0.0, np.abs(one - other))
    gap = np.where(np.isnan(gap), np.inf, gap)
    largest = float(np.nanmax(np.abs(np.where(np.isfinite(one), one, 0.0))))
    at = int(gap.argmax())
    return float(gap.flat[at]) / max(largest, floor, 1e-12), at


def _factor(
    before: npt.NDArray[Any] | None, mine: npt.NDArray[Any], theirs: npt.NDArray[Any]
) -> float | None:
    """How many times larger the change is on the ranks; None if factors differ."""
    import numpy as np

    if before is None or mine.shape != theirs.shape or mine.shape != before.shape:
        return None
    one = (mine.astype(np.float64) - before).ravel()
    other = (theirs.astype(np.float64) - before).ravel()
    norm = float(one @ one)
    if norm == 0.0:
        return None
    factor = float(one @ other) / norm
    rest = other - factor * one
    same = float(rest @ rest) <= 1e-6 * max(float(other @ other), 1e-30)
    return factor if same else None


def _relative(mine: float, theirs: float) -> float:
    if mine == theirs or (mine != mine and theirs != theirs):
        return 0.0
    if mine != mine or theirs != theirs:
        return float("inf")
    # An accuracy near 0 is as exact as one near 1.
    return abs(mine - theirs) / max(abs(mine), 0.1)

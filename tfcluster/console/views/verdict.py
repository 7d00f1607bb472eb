"""The answer of ``tfcluster verify`` as text."""

from __future__ import annotations

import math

from tfcluster.console.text import table
from tfcluster.verify.verdict import Verdict

_KINDS = {
    "learning_rate": "learning rate",
    "weight": "weights",
    "state": "layers' states",
    "slot": "optimizers' variables",
    "logs": "losses and metrics",
    "run": "fetched from sessions",
}


def lines(verdict: Verdict, *, brief: bool = False) -> list[str]:
    """The verdict, the first difference, its causes, and, unless ``brief``, a table."""
    comparison = verdict.comparison
    ranks = f"{verdict.size} rank{'s' if verdict.size > 1 else ''}"
    if (failed := verdict.failed_alone) is not None:
        said = "not compared: the program fails in one process"
        return [f"{said}: {failed.reason}", *_indented(failed.tail)]
    if (failed := verdict.failed_on_ranks) is not None:
        said = "refused" if failed.refused else "not compared: the program fails"
        task = f"{failed.task}: " if failed.task and not failed.refused else ""
        hint = [f"  hint: {failed.hint}"] if failed.hint else []
        reason = f"{said} on {ranks}: {task}{failed.reason}"
        return [reason, *hint, *_indented(failed.tail)]
    if comparison is None:
        return []
    also = [f"not compared: {what}" for what in verdict.not_compared]
    if comparison.steps == 0 and verdict.first is None:
        said = f"no training step was recorded, alone or on {ranks}"
        if verdict.complete:
            said += "; what the program wrote and printed is equal"
        return [said, *also]
    steps = f"{comparison.steps} step{'s' if comparison.steps != 1 else ''}"
    end = ", to the end of the program" if verdict.complete else ""
    with_what = f"({ranks}, {verdict.strategy})"
    if verdict.first is None:
        part = _part(comparison.of_noise, verdict)
        found = [f"equal, {part} after {steps}{end} {with_what}"]
    else:
        part = ""
        if verdict.first.of_noise is not None:
            part = f", {_part(verdict.first.of_noise, verdict)}"
        found = [
            f"different{part} {with_what}: {verdict.first.words()}",
            *(f"  cause: {cause}" for cause in verdict.causes),
        ]
    if verdict.by_chance is not None:
        found.append(f"  another run may differ: {verdict.by_chance}")
    if verdict.baseline:
        found.append(f"compared with {verdict.baseline}")
    if brief:
        return [*found, *also]
    rows = [
        (
            _KINDS[each.kind],
            f"{each.compared:,}",
            f"{each.largest:.1e}",
            _number(each.of_noise),
        )
        for each in comparison.quantities
    ]
    if rows:
        of_what = "of the tolerance" if _is_given(verdict) else "of the noise"
        header = ("compared", "values", "largest difference", of_what)
        found += ["", *table(rows, header, right=(1, 2, 3))]
    if (tolerance := verdict.tolerance) is not None:
        least = "" if tolerance.given else "the noise is at least "
        found += ["", f"{least}{tolerance.value:.0e}: {tolerance.why}"]
    return [*found, *also]


def _indented(tail: tuple[str, ...]) -> list[str]:
    return [f"  | {line}" for line in tail]


def _part(of_noise: float, verdict: Verdict) -> str:
    """``at most 0.02 of the noise of one machine``."""
    if of_noise == 0:
        return "to the last bit,"
    noise = "the tolerance" if _is_given(verdict) else "the noise of one machine"
    if math.isinf(of_noise):
        return f"beyond {noise}"
    if of_noise > 1:
        return f"{_number(of_noise)} times {noise}"
    return f"at most {_number(of_noise)} of {noise},"


def _number(of_noise: float) -> str:
    """``0.0031``, ``0.02``, ``1.7``, ``1,200``."""
    return f"{of_noise:,.0f}" if 10 <= of_noise < 1e6 else f"{of_noise:.2g}"


def _is_given(verdict: Verdict) -> bool:
    return verdict.tolerance is not None and verdict.tolerance.given

"""The answer of ``tfcluster verify`` as text."""

from __future__ import annotations

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
    if verdict.first is None:
        to = f"{comparison.largest:.0e}"
        with_what = f"({ranks}, {verdict.strategy})"
        found = [f"equal to {to} after {steps}{end} {with_what}"]
    else:
        found = [
            f"different ({ranks}, {verdict.strategy}): {verdict.first.words()}",
            *(f"  cause: {cause}" for cause in verdict.causes),
        ]
    if verdict.by_chance is not None:
        found.append(f"  another run may differ: {verdict.by_chance}")
    if verdict.baseline:
        found.append(f"compared with {verdict.baseline}")
    if brief:
        return [*found, *also]
    rows = [
        (_KINDS[each.kind], f"{each.compared:,}", f"{each.largest:.1e}")
        for each in comparison.quantities
    ]
    if rows:
        header = ("compared", "values", "largest difference")
        found += ["", *_table([header, *rows])]
    if (tolerance := verdict.tolerance) is not None:
        found += ["", f"tolerance {tolerance.value:.0e}: {tolerance.why}"]
    return [*found, *also]


def _indented(tail: tuple[str, ...]) -> list[str]:
    return [f"  | {line}" for line in tail]


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{a:<{first}}  {b:>{second}}  {c:>{third}}" for a, b, c in rows]

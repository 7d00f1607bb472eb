"""The answers of ``tfcluster verify`` and ``tfcluster explain`` as text. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.console.text import byte_size, plural, table
from tfcluster.verify.verdict import Verdict

_KINDS = {
    "learning_rate": "learning rate",
    "weight": "weights",
    "state": "layers' states",
    "slot": "optimizers' variables",
    "logs": "losses and metrics",
    "run": "fetched from sessions",
}


def verdict_lines(verdict: Verdict, *, brief: bool = False) -> list[str]:
    """The verdict, the first difference, its causes, and, unless ``brief``, a table."""
    comparison = verdict.comparison
    ranks = f"{verdict.size} rank{'s' if verdict.size > 1 else ''}"
    if (failed := verdict.failed_alone) is not None:
        text = "not compared: the program fails in one process"
        return [f"{text}: {failed.reason}", *_indented(failed.tail)]
    if (failed := verdict.failed_on_ranks) is not None:
        text = "refused" if failed.refused else "not compared: the program fails"
        task = f"{failed.task}: " if failed.task and not failed.refused else ""
        hint = [f"  hint: {failed.hint}"] if failed.hint else []
        reason = f"{text} on {ranks}: {task}{failed.reason}"
        return [reason, *hint, *_indented(failed.tail)]
    if comparison is None:
        return []
    also = [f"not compared: {what}" for what in verdict.not_compared]
    if comparison.steps == 0 and verdict.first is None:
        text = f"no training step was recorded, alone or on {ranks}"
        if verdict.complete:
            text += "; what the program wrote and printed is equal"
        return [text, *also]
    steps = f"{comparison.steps} step{'s' if comparison.steps != 1 else ''}"
    end = ", to the end of the program" if verdict.complete else ""
    with_what = f"({ranks}, {verdict.strategy})"
    if verdict.first is None:
        part = _part(comparison.of_noise, verdict)
        shown = [f"equal, {part} after {steps}{end} {with_what}"]
    else:
        part = ""
        if verdict.first.of_noise is not None:
            part = f", {_part(verdict.first.of_noise, verdict)}"
        shown = [
            f"different{part} {with_what}: {verdict.first.words()}",
            *(f"  cause: {cause}" for cause in verdict.causes),
        ]
    if verdict.by_chance is not None:
        shown.append(f"  another run may differ: {verdict.by_chance}")
    if verdict.baseline:
        shown.append(f"compared with {verdict.baseline}")
    if brief:
        return [*shown, *also]
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
        shown += ["", *table(rows, header, right=(1, 2, 3))]
    if (tolerance := verdict.tolerance) is not None:
        least = "" if tolerance.given else "the noise is at least "
        shown += ["", f"{least}{tolerance.value:.0e}: {tolerance.why}"]
    return [*shown, *also]


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


_MOST = 8
"""The number of rows of a table; ``--json`` has all."""

Function = Mapping[str, Any]


def explanation_lines(answer: Mapping[str, Any], *, brief: bool = False) -> list[str]:
    """A table of the functions, and, unless ``brief``, the details of each."""
    functions = answer["functions"]
    divisible = [each for each in functions if each["rows"] or each["trains"]]
    others = [each for each in functions if each not in divisible]
    header = ("function", "rows", "work divided", "exchanges", "exchanged per call")
    rows = [
        (
            each["name"],
            "-" if each["rows"] is None else str(each["rows"]),
            f"{each['divided_share']:.1%}",
            str(each["exchanges"]),
            byte_size(each["exchanged_bytes"]),
        )
        for each in divisible
    ]
    shown = [f"On {answer['ranks']} ranks:", ""]
    shown += table(rows, header, right=(1, 2, 3, 4))
    if not rows:
        shown = [f"On {answer['ranks']} ranks, nothing is divided."]
    if answer["mostly_whole"]:
        shown += ["", f"warning: {answer['mostly_whole']}"]
    if brief:
        return shown
    shown += [
        f"{each['name']} is computed whole: no batch was found that has at least as "
        "many rows as there are ranks"
        for each in divisible
        if each["rows"] is None and not answer["mostly_whole"]
    ]
    for each in divisible:
        shown += _exchanged(each) + _whole(each)
    failed = [each for each in others if each["error"]]
    for each in failed:
        shown += ["", f"{each['name']} is computed whole: {each['error']}"]
    without = sorted({each["name"] for each in others if not each["error"]})
    if without:
        shown += ["", f"Without a batch, computed by every rank: {', '.join(without)}"]
    return shown


def _exchanged(function: Function) -> list[str]:
    tensors = function["exchanged"]
    if not tensors:
        return []
    rows = [
        (
            "gather" if each["kind"] == "rows" else each["kind"],
            byte_size(each["bytes"]) if each["bytes"] else "?",
            each["name"],
            each["wanted_by"],
            each["line"] or "",
        )
        for each in tensors[:_MOST]
    ]
    header = ("exchange", "bytes", "tensor", "wanted by", "line")
    title = f"{function['name']}: what the ranks exchange"
    return ["", title, *_cut(table(rows, header, right=(1,), indent="  "), tensors)]


def _whole(function: Function) -> list[str]:
    ops = function["whole"]
    if not ops:
        return []
    rows = []
    for each in ops[:_MOST]:
        weight = (each["cost"] + each["following_cost"]) / max(function["cost"], 1)
        share = f"{weight:.1%}" if weight >= 0.0005 else "<0.1%"
        name = each["op"] if each["count"] == 1 else f"{each['count']} {each['op']}"
        rows.append((name, share, each["reason"], each["line"] or ""))
    header = ("op", "work", "reason", "line")
    title = (
        f"{function['name']}: what every rank computes whole, with what follows from it"
    )
    return ["", title, *_cut(table(rows, header, right=(1,), indent="  "), ops)]


def _cut(shown: list[str], whole: Sequence[object]) -> list[str]:
    left = len(whole) - _MOST
    return [*shown, f"  and {plural(left, 'row')} more"] if left > 0 else shown

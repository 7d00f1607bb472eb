"""The answers of ``tfcluster verify`` and ``tfcluster explain`` as text. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.console.text import byte_size, plural, table
from tfcluster.verify.compare import Comparison
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
    ranks = plural(verdict.size, "rank")
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
    with_what = f"({ranks}, {verdict.strategy})"
    if (first := verdict.first) is None:
        end = ", to the end of the program" if verdict.complete else ""
        steps = f"after {plural(comparison.steps, 'step')}{end}"
        shown = [f"equal, {_part(comparison.of_noise, verdict)} {steps} {with_what}"]
    else:
        part = "" if first.of_noise is None else f", {_part(first.of_noise, verdict)}"
        shown = [f"different{part} {with_what}: {first.words()}"]
        shown += [f"  cause: {cause}" for cause in verdict.causes]
    if verdict.by_chance is not None:
        shown.append(f"  another run may differ: {verdict.by_chance}")
    if verdict.baseline:
        shown.append(f"compared with {verdict.baseline}")
    return [*shown, *([] if brief else _table(verdict, comparison)), *also]


def _table(verdict: Verdict, comparison: Comparison) -> list[str]:
    rows = [
        (
            _KINDS[quantity.kind],
            f"{quantity.compared:,}",
            f"{quantity.largest:.1e}",
            _number(quantity.of_noise),
        )
        for quantity in comparison.quantities
    ]
    of_what = "of the tolerance" if _is_chosen(verdict) else "of the noise"
    header = ("compared", "values", "largest difference", of_what)
    shown = ["", *table(rows, header, right=(1, 2, 3))] if rows else []
    if (tolerance := verdict.tolerance) is not None:
        least = "" if tolerance.chosen else "the noise is at least "
        shown += ["", f"{least}{tolerance.value:.0e}: {tolerance.why}"]
    return shown


def _indented(tail: tuple[str, ...]) -> list[str]:
    return [f"  | {line}" for line in tail]


def _part(of_noise: float, verdict: Verdict) -> str:
    if of_noise == 0:
        return "to the last bit,"
    noise = "the tolerance" if _is_chosen(verdict) else "the noise of one machine"
    if math.isinf(of_noise):
        return f"beyond {noise}"
    if of_noise > 1:
        return f"{_number(of_noise)} times {noise}"
    return f"at most {_number(of_noise)} of {noise},"


def _number(of_noise: float) -> str:
    return f"{of_noise:,.0f}" if 10 <= of_noise < 1e6 else f"{of_noise:.2g}"


def _is_chosen(verdict: Verdict) -> bool:
    return verdict.tolerance is not None and verdict.tolerance.chosen


_MOST = 8
"""The number of rows of a table; ``--json`` has all."""

Function = Mapping[str, Any]


def explanation_lines(answer: Mapping[str, Any], *, brief: bool = False) -> list[str]:
    """A table of the functions, and, unless ``brief``, the details of each."""
    functions: Sequence[Function] = answer["functions"]
    divisible = [f for f in functions if f["rows"] or f["trains"]]
    header = ("function", "rows", "work divided", "exchanges", "exchanged per call")
    rows = [
        (
            function["name"],
            "-" if function["rows"] is None else str(function["rows"]),
            f"{function['divided_share']:.1%}",
            str(function["exchanges"]),
            byte_size(function["exchanged_bytes"]),
        )
        for function in divisible
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
        f"{function['name']} is computed whole: no batch was found that has at least "
        "as many rows as there are ranks"
        for function in divisible
        if function["rows"] is None and not answer["mostly_whole"]
    ]
    shown += _pipelines(divisible, answer["loops"])
    for function in divisible:
        shown += _exchanged(function) + _whole(function) + function["assigned"]
    others = [function for function in functions if function not in divisible]
    for function in others:
        if function["error"]:
            shown += ["", f"{function['name']} is computed whole: {function['error']}"]
    without = sorted({f["name"] for f in others if not f["error"]})
    if without:
        shown += ["", f"Without a batch, computed by every rank: {', '.join(without)}"]
    return shown


def _pipelines(
    functions: Sequence[Function], loops: Sequence[Mapping[str, Any]]
) -> list[str]:
    pipelines = [
        (function["name"], pipeline)
        for function in functions
        for pipeline in function["pipelines"]
    ]
    pipelines += [(f"loop at {loop['line'] or '?'}", loop) for loop in loops]
    rows = [
        (
            reader,
            "own rows" if pipeline["divided"] else "whole batches",
            pipeline["reason"] or "",
        )
        for reader, pipeline in pipelines
    ]
    title = "What a rank computes of the datasets that functions and loops read"
    return _first(rows, ("read by", "computes", "reason"), title)


def _exchanged(function: Function) -> list[str]:
    rows = [
        (
            "gather" if tensor["kind"] == "rows" else tensor["kind"],
            byte_size(tensor["bytes"]) if tensor["bytes"] else "?",
            tensor["name"],
            tensor["wanted_by"],
            tensor["line"] or "",
        )
        for tensor in function["exchanged"]
    ]
    header = ("exchange", "bytes", "tensor", "wanted by", "line")
    return _first(rows, header, f"{function['name']}: what the ranks exchange")


def _whole(function: Function) -> list[str]:
    rows = []
    for op in function["whole"]:
        weight = (op["cost"] + op["following_cost"]) / max(function["cost"], 1)
        share = f"{weight:.1%}" if weight >= 0.0005 else "<0.1%"
        name = op["op"] if op["count"] == 1 else f"{op['count']} {op['op']}"
        rows.append((name, share, op["reason"], op["line"] or ""))
    title = (
        f"{function['name']}: what every rank computes whole, with what follows from it"
    )
    return _first(rows, ("op", "work", "reason", "line"), title)


def _first(
    rows: Sequence[Sequence[str]], header: Sequence[str], title: str
) -> list[str]:
    shown = ["", title, *table(rows[:_MOST], header, right=(1,), indent="  ")]
    if (left := len(rows) - _MOST) > 0:
        shown.append(f"  and {plural(left, 'row')} more")
    return shown if rows else []

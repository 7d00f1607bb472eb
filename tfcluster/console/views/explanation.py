"""The answer of ``tfcluster explain`` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.console.text import byte_size, plural, table

_MOST = 8
"""The number of rows of a table; ``--json`` has all."""

Function = Mapping[str, Any]


def lines(answer: Mapping[str, Any], *, brief: bool = False) -> list[str]:
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
    found = [f"On {answer['ranks']} ranks:", ""]
    found += table(rows, header, right=(1, 2, 3, 4))
    if not rows:
        found = [f"On {answer['ranks']} ranks, nothing is divided."]
    if answer["mostly_whole"]:
        found += ["", f"warning: {answer['mostly_whole']}"]
    if brief:
        return found
    found += [
        f"{each['name']} is computed whole: no batch was found that has at least as "
        "many rows as there are ranks"
        for each in divisible
        if each["rows"] is None and not answer["mostly_whole"]
    ]
    for each in divisible:
        found += _exchanged(each) + _whole(each)
    failed = [each for each in others if each["error"]]
    for each in failed:
        found += ["", f"{each['name']} is computed whole: {each['error']}"]
    without = sorted({each["name"] for each in others if not each["error"]})
    if without:
        found += ["", f"Without a batch, computed by every rank: {', '.join(without)}"]
    return found


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

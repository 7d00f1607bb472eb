"""Text in columns, and numbers for people. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from tfcluster.base.vocabulary import RANKED_TYPES, TASK_TYPES
from tfcluster.console.sanitise import without_colours
from tfcluster.plan.host_patterns import fold


def width(text: str) -> int:
    text = without_colours(text)
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def cut(text: str, columns: int) -> str:
    """``text``, or as much of it as fits followed by an ellipsis."""
    if width(text) <= columns:
        return text
    kept, taken = [], 1
    for character in text:
        taken += _columns(character)
        if taken > columns:
            break
        kept.append(character)
    return "".join(kept) + "…" if columns > 0 else ""


def duration(seconds: float) -> str:
    """``0.4 s``, ``42 s``, ``3 min 05 s``, ``2 h 03 min``, ``5 d 07 h``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for limit, unit, small, smaller in (
        (3600, 60, "min", "s"),
        (86_400, 3600, "h", "min"),
    ):
        if whole < limit:
            rest = whole % unit * 60 // unit
            return f"{whole // unit} {small} {rest:02d} {smaller}"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def clock(seconds: float) -> str:
    whole = int(max(0.0, seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def times(count: int) -> str:
    teen = count % 100 in (11, 12, 13)
    end = "th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{end} time"


def byte_size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def table(
    rows: Iterable[Sequence[str]],
    header: Sequence[str] = (),
    *,
    right: Iterable[int] = (),
    indent: str = "",
) -> list[str]:
    """The lines of a table without empty columns; those in ``right`` align right."""
    body = [list(row) for row in rows]
    count = max(map(len, body), default=0)
    columns = [i for i in range(count) if any(len(r) > i and r[i] for r in body)]
    lines = [list(header), *body] if header and body else body
    widths = {i: max(width(row[i]) for row in lines if len(row) > i) for i in columns}
    flush = set(right)
    drawn = []
    for row in lines:
        cells = []
        for i in columns:
            cell = row[i] if len(row) > i else ""
            blank = " " * (widths[i] - width(cell))
            cells.append(blank + cell if i in flush else cell + blank)
        drawn.append((indent + "  ".join(cells)).rstrip())
    return drawn


def is_rank(task: str) -> bool:
    return task.partition(":")[0] in RANKED_TYPES


def fold_tasks(tasks: Iterable[str]) -> str:
    """``worker:[0-31],ps:0``: task names by type, in the order of TASK_TYPES."""
    by_type: dict[str, set[int]] = {kind: set() for kind in TASK_TYPES}
    for task in tasks:
        kind, _, index = task.partition(":")
        by_type.setdefault(kind, set()).add(int(index) if index.isdecimal() else 0)
    return ",".join(
        f"{kind}:{fold([f'n{index}' for index in sorted(indices)])[1:]}"
        for kind, indices in by_type.items()
        if indices
    )


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1

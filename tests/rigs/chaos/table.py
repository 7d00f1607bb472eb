"""The table of a campaign: a row for each site and kind of fault. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.rigs.chaos.faults import SITES
from tests.rigs.chaos.trial import Result

_HEADINGS = (
    *("site", "fault", "trials", "missed", "violations"),
    *("noticed: median", "worst", "clean: worst"),
)


def table(results: Sequence[Result]) -> list[str]:
    """The lines of the table; ``missed``: the run was over before the fault."""
    keys = sorted(
        {(result.trial.site, result.trial.fault.name) for result in results},
        key=lambda key: (SITES.index(key[0]), key[1]),
    )
    rows = [_HEADINGS, *(_row(key, results) for key in keys), _sum(results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(key: tuple[str, str], results: Sequence[Result]) -> tuple[str, ...]:
    site, fault = key
    of_it = [r for r in results if (r.trial.site, r.trial.fault.name) == key]
    return (site, fault, *_figures(of_it))


def _sum(results: Sequence[Result]) -> tuple[str, ...]:
    return ("all", "", *_figures(results))


def _figures(results: Sequence[Result]) -> tuple[str, ...]:
    noticed = [r.notice_s for r in results if r.notice_s is not None]
    clean = [r.clean_s for r in results if r.clean_s is not None]
    return (
        f"{len(results)}",
        f"{sum(result.missed for result in results)}",
        f"{sum(bool(result.violations) for result in results)}",
        f"{statistics.median(noticed):.1f} s" if noticed else "-",
        f"{max(noticed):.1f} s" if noticed else "-",
        f"{max(clean):.1f} s" if clean else "-",
    )

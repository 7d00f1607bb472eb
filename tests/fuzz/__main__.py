"""``make fuzz``: mutated inputs for every parser, guided by coverage.

Exits with 1 if it finds a defect, and prints a command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from base64 import b64decode
from collections.abc import Sequence
from typing import TextIO

from tests.fuzz.campaign import Report, campaign
from tests.fuzz.target import Target
from tests.fuzz.targets import targets
from tests.fuzz.trial import MOST_S, attempt, limit_memory

_HEADINGS = (
    *("target", "inputs", "per s", "lines", "corpus", "refused", "slowest", "memory"),
    "defects",
)


def main(words: Sequence[str]) -> int:
    known = targets()
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for all targets")
    parser.add_argument("--seed", type=int, default=0, help="repeats a campaign")
    parser.add_argument("--input", help="try only this input, as it was printed")
    parser.add_argument("target", nargs="*", help=", ".join(known))
    options = parser.parse_args(words)
    if unknown := [name for name in options.target if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}")
    chosen = [known[name] for name in options.target or known]
    if options.input is not None:
        return _repeat(chosen, zlib.decompress(b64decode(options.input)))
    seconds = options.minutes * 60 / len(chosen)
    reports = [campaign(t, seconds, options.seed, _show_progress) for t in chosen]
    _say("\r\033[K" if sys.stderr.isatty() else "", sys.stderr)
    for line in table(reports):
        _say(line + "\n")
    found = [
        (report.target, *defect) for report in reports for defect in report.defects
    ]
    for name, text, word in found:
        _say(f"\n{name}: {text}\n  python -m tests.fuzz --input {word} {name}\n")
    return 1 if found else 0


def _repeat(chosen: Sequence[Target], data: bytes) -> int:
    limit_memory()
    for target in chosen:
        outcome = attempt(target, data, most_s=20 * MOST_S)
        _say(
            f"{target.name}: {len(data)} bytes, {outcome.seconds:.3f} s, "
            f"{outcome.peak_bytes / 1e6:.0f} MB, "
            f"{outcome.defect.text if outcome.defect else 'no defect'}\n"
        )
        if outcome.defect:
            return 1
    return 0


def _show_progress(report: Report) -> None:
    if sys.stderr.isatty():
        _say(f"\r\033[K{'  '.join(_row(report))}", sys.stderr)


def table(reports: Sequence[Report]) -> list[str]:
    """The lines of a table with a row for each target."""
    rows = [_HEADINGS, *map(_row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _row(report: Report) -> tuple[str, ...]:
    return (
        report.target,
        f"{report.inputs}",
        f"{report.inputs / max(report.seconds, 1e-9):.0f}",
        f"{report.lines}",
        f"{report.corpus}",
        f"{report.refused / max(report.inputs, 1):.0%}",
        f"{report.slowest_s * 1000:.0f} ms / {report.slowest_bytes} B",
        f"{report.peak_bytes / 1e6:.1f} MB",
        f"{len(report.defects)}",
    )


def _say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(text)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

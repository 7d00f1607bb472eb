"""``make chaos``: trials in which something breaks at a random time.

Prints a table by site and kind of fault and, for each violation, a command that repeats
the trial and the folder with its record. Exits with 1 if there is a violation.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from typing import TextIO

from tests.rigs.chaos.faults import LOCAL, SITES, faults
from tests.rigs.chaos.plan import PROGRAMS, Trial, Wanted, draw
from tests.rigs.chaos.sites import LocalSite, RigSite, Site
from tests.rigs.chaos.table import table
from tests.rigs.chaos.trial import Result, run
from tests.rigs.testbed import packages
from tests.rigs.testbed.commands import Unavailable


def main(words: Sequence[str]) -> int:
    parser = _parser()
    given = parser.parse_args(words)
    if given.hosts < 2:
        parser.error("--hosts: at least 2")
    possible = [s for s in SITES if given.site in (None, s) and _possible(s)]
    if not possible:
        return 2
    wanted = _wanted(given)
    seed = SystemRandom().randrange(10**6) if given.seed is None else given.seed
    try:
        trials = [draw(seed + n, wanted, possible) for n in range(given.trials)]
    except (ValueError, KeyError) as error:
        parser.error(f"no such trial: {error}")
    _say(f"seed {seed}\n", sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: list[Result] = []
    try:
        _run_all(trials, results, given.minutes)
    except KeyboardInterrupt:
        _say("interrupted: this is the table so far\n", sys.stderr)
    _print(results)
    return 1 if any(result.violations for result in results) else 0


def wanted_by(words: Sequence[str]) -> tuple[int, Wanted]:
    """The first seed, and what else the words of a command ask for."""
    given = _parser().parse_args(words)
    return given.seed, _wanted(given)


def _wanted(given: argparse.Namespace) -> Wanted:
    return Wanted(
        hosts=given.hosts, site=given.site, fault=given.fault, program=given.program
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.rigs.chaos", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument(
        "--hosts", type=int, default=4, help="of a rig, and tasks of a run (default: 4)"
    )
    parser.add_argument(
        "--seed", type=int, help="of the first trial; each next one has the next seed"
    )
    parser.add_argument("--minutes", type=float, help="begin no trial after so long")
    parser.add_argument("--site", choices=SITES)
    names = sorted({name for site in SITES for name in faults(site)})
    parser.add_argument(
        "--fault", choices=names, metavar="FAULT", help=", ".join(names)
    )
    parser.add_argument("--program", choices=PROGRAMS)
    return parser


_NEEDS = {"ssh": ("ssh",), "slurm": ("ssh", "slurm"), "sge": ("ssh", "sge")}


def _possible(site: str) -> bool:
    if site == LOCAL:
        return True
    try:
        packages.check_root()
        packages.require(_NEEDS[site])
    except Unavailable as error:
        _say(f"no trials on {site}: {error}\n", sys.stderr)
        return False
    return True


def _run_all(
    trials: Sequence[Trial], results: list[Result], minutes: float | None
) -> None:
    """Run the trials site by site: there is one rig at a time."""
    keep = Path(tempfile.mkdtemp(prefix="tfcluster-chaos-"))
    began, number = time.monotonic(), 0
    for name in SITES:
        of_it = [trial for trial in trials if trial.site == name]
        if not of_it:
            continue
        site = _site(name, of_it[0].hosts, keep)
        try:
            for trial in of_it:
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    break
                if trial.fault.name == "full-state" and os.geteuid():
                    continue  # only root can mount a small disk
                number += 1
                result = run(trial, site, number, keep / "violations")
                results.append(result)
                _show(result, len(results), len(trials))
                if result.site_is_broken:
                    site.close()
                    site = _site(name, trial.hosts, keep)
        finally:
            site.close()


def _site(name: str, hosts: int, folder: Path) -> Site:
    return LocalSite(folder / "local") if name == LOCAL else RigSite(name, hosts)


def _show(result: Result, number: int, count: int) -> None:
    trial = result.trial
    ends = "VIOLATION" if result.violations else "missed" if result.missed else "ok"
    figures = [
        f"{what} {value:.1f} s"
        for what, value in (("noticed", result.notice_s), ("clean", result.clean_s))
        if value is not None
    ]
    line = (
        f"{number}/{count} seed {trial.seed} {trial.site} {trial.program} "
        f"{trial.fault.name} ({trial.phase}): {ends} {', '.join(result.struck)}; "
        f"code {result.code} {' '.join(figures)}"
    )
    _say(line + "\n", sys.stderr)
    for violation in result.violations:
        _say(f"    {violation}\n", sys.stderr)


def _print(results: Sequence[Result]) -> None:
    for line in table(results):
        _say(line + "\n")
    for result in results:
        if result.violations:
            trial = result.trial
            _say(f"\nseed {trial.seed}: {trial.fault.name} on {trial.site}, ")
            _say(f"{'; '.join(result.struck) or 'nothing struck'}\n")
            for violation in result.violations:
                _say(f"  {violation}\n")
            _say(f"  {trial.command}\n  record: {result.kept}\n")


def _say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(text)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

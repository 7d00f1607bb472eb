"""``python -m tests.interruptions``: interrupts programs that save their model.

Prints a line for each trial, the counts by idiom, and exits with 1 if something is
wrong. A trial is repeated with its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.interruptions import trial
from tests.kit.cluster import Cluster


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.interruptions")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--minutes", type=float, help="begin no trial after so long")
    parser.add_argument("--idiom", choices=(*trial.IDIOMS, *trial.MORE_IDIOMS))
    parser.add_argument(
        "--strategy", choices=tuple(trial.STRATEGIES), default="collective"
    )
    parser.add_argument("--set", action="append", default=[], help="as of launch")
    given = parser.parse_args()
    good: Counter[str] = Counter()
    all_: Counter[str] = Counter()
    until_s = time.monotonic() + 60 * (given.minutes or 1e9)
    for seed in range(given.seed, given.seed + given.trials):
        if time.monotonic() > until_s:
            break
        chosen = trial.drawn(seed, given.idiom)
        folder = Path(tempfile.mkdtemp(prefix=f"interruption-{seed}-"))
        cluster = Cluster(folder)
        try:
            problems = trial.run(cluster, chosen, given.set, given.strategy)
        except AssertionError as error:
            problems = [str(error)]
        finally:
            cluster.end()
        all_[chosen.idiom] += 1
        good[chosen.idiom] += not problems
        told = f"{problems} in {folder}" if problems else "good"
        sys.stdout.write(f"{seed}: {chosen}: {told}\n")
        sys.stdout.flush()
    for idiom, count in all_.items():
        sys.stdout.write(f"{idiom:10} {good[idiom]} of {count}\n")
    return 0 if good == all_ else 1


if __name__ == "__main__":
    sys.exit(main())

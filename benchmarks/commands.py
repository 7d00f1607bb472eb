"""The time of ``tfcluster --help``, and of ``tfcluster status`` for a run."""

from __future__ import annotations

import sys

from benchmarks.measure import Row, command, medians, seconds, show, state, tfcluster

REPEATS = 15
LIMIT_S = 0.2


def main() -> None:
    with state() as env:
        quiet = ("--set", "runtime.strategy=none")
        seconds(tfcluster("launch", "-n", "8", *quiet, "--", command("true")), env)
        found = medians(
            {
                "--help": lambda: seconds(tfcluster("--help"), env),
                "status": lambda: seconds(tfcluster("status"), env),
                "peer": lambda: seconds([sys.executable, "-c", "import click"], env),
            },
            REPEATS,
        )
    peer = found["peer"]
    rows = [
        Row(f"tfcluster {word}", found[word], "import click", peer, LIMIT_S / peer)
        for word in ("--help", "status")
    ]
    show("Commands (at most 0.2 s)", rows)


if __name__ == "__main__":
    main()

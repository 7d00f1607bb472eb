"""The time to plan 3,000 tasks on 1,000 hosts, as text and as JSON."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.measure import Row, medians, seconds, show, state, tfcluster

REPEATS = 5
LIMIT_S = 1.0
CONFIG = """\
backend: ssh
command: python train.py
hosts: ["node[0001-1000]"]
tasks: {chief: 1, worker: 2949, ps: 50}
"""


def main() -> None:
    with state() as env, tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "cluster.yaml")
        config.write_text(CONFIG)
        text = tfcluster("plan", str(config))
        found = medians(
            {
                "text": partial(seconds, text, env),
                "JSON": partial(seconds, [*text, "--json"], env),
                "python": partial(seconds, [sys.executable, "-c", "pass"], env),
            },
            REPEATS,
        )
    start = found["python"]
    target = (LIMIT_S + start) / start
    show(
        "Plan (at most 1 s beyond the interpreter's start)",
        [
            Row(f"3,000 tasks as {kind}", found[kind], "python -c pass", start, target)
            for kind in ("text", "JSON")
        ],
    )


if __name__ == "__main__":
    main()

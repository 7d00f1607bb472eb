"""What ``runtime.shards`` costs: an MLP of 10.0 M parameters, SGD, on 1 and 2 ranks.

A batch of 64 rows has shards of 8 rows, and a matrix product of so few rows costs more
per row. So a batch of 256 rows is measured, too. Every round runs each contender once,
so the ratios hold even if the machine's speed changes. The last table shows what plain
TensorFlow needs for a rank's gradients, whole and in as many parts as the rank has
shards. As many processes run at once as there are ranks, without tfcluster and without
any exchange: no run with shards can cost less.

``python -m benchmarks.shards [ROUNDS] [floor]``; ``floor``: only the last table.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.collective import PROGRAMS, said_by, said_in
from benchmarks.contenders import TRAINERS
from benchmarks.measure import HERE, state, tfcluster

BATCHES = (64, 256)
RANKS = (1, 2)
SHARDS = (None, 8)
WORDS = ("--steps", "10", "--optimizer", "sgd")
ROUNDS = 3
TARGET = 1.25
"""The target for a step with 8 shards, batch 64 and two ranks: at most this many times
a step without shards."""

Case = tuple[int, int, int | None]
"""The batch size, the number of ranks, and of shards."""


def argv_of(case: Case) -> Sequence[str]:
    batch, ranks, shards = case
    options = [] if shards is None else ["--set", f"runtime.shards={shards}"]
    program = str(TRAINERS / "keras_fit.py")
    words = (program, "mlp", "--batch", str(batch), *WORDS)
    return tfcluster("launch", "-n", str(ranks), *options, "--", "python", *words)


def measure(env: Mapping[str, str], rounds: int) -> dict[Case, list[float]]:
    """Seconds for each step, by case and round."""
    cases = [(b, r, s) for b in BATCHES for r in RANKS for s in SHARDS]
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(said_by(argv_of(case), env)["step"])
            print(case, f"{found[case][-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    return found


def floor(env: Mapping[str, str], batch: int, ranks: int) -> tuple[float, float]:
    """Seconds for the gradients of a rank's rows, whole and in parts."""
    program = PROGRAMS / "gradient_by_parts.py"
    words = (sys.executable, str(program), str(batch // ranks), str(8 // ranks))
    together = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(ranks)
    ]
    times = [said_in(process.communicate()[0], words) for process in together]
    whole, parts = (statistics.mean(t[name] for t in times) for name in times[0])
    return whole, parts


def show_floor(env: Mapping[str, str], rounds: int) -> None:
    print("\n### The gradients alone, by plain TensorFlow\n")
    print("| batch | processes | parts of each | whole | in parts | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for batch in BATCHES:
        for ranks in RANKS:
            pairs = [floor(env, batch, ranks) for _ in range(rounds)]
            whole, parts = (
                statistics.median(each) for each in zip(*pairs, strict=True)
            )
            ratio = statistics.median(parts / whole for whole, parts in pairs)
            cells = [str(batch), str(ranks), str(8 // ranks)]
            cells += [
                f"{whole * 1e3:.1f} ms",
                f"{parts * 1e3:.1f} ms",
                f"**{ratio:.2f}**",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    words = sys.argv[1:]
    rounds = next((int(word) for word in words if word.isdecimal()), ROUNDS)
    with state() as env:
        env |= {
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
        }
        if "floor" not in words:
            show(measure(env, rounds))
        show_floor(env, rounds)


def show(found: Mapping[Case, Sequence[float]]) -> None:
    print("\n### A step with and without shards, 10.0 M parameters\n")
    print("| batch | ranks | shards | a step | times without shards | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case, times in found.items():
        batch, ranks, shards = case
        plain = found[batch, ranks, None]
        ratio = statistics.median(a / b for a, b in zip(times, plain, strict=True))
        is_target = (batch, ranks, shards) == (64, 2, 8)
        cells = [
            str(batch),
            str(ranks),
            "none" if shards is None else str(shards),
            f"{statistics.median(times) * 1e3:.1f} ms",
            f"**{ratio:.2f}**",
            f"{TARGET:.2f}" if is_target else "",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

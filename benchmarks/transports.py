"""``transport: tensorflow`` compared with the ring of MultiWorkerMirroredStrategy.

Also shows ``transport: host``, and the gain from each setting of ``tensorflow`` that
TensorFlow itself leaves at its default.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping

from benchmarks.collective import MIB, PROGRAMS, Times, times, words
from benchmarks.measure import HERE, state, tfcluster

SIZES = [MIB, 16 * MIB, 64 * MIB]
COUNTS = (2, 4)
ROUNDS = 3

STRATEGY = "MultiWorkerMirroredStrategy"
SETTINGS: dict[str, dict[str, int]] = {
    "tensorflow": {},
    "with fields of 4 KiB": {"recv_buf_max_chunk": 0},
    "with one connection": {"num_channels_per_target": 0},
    "without subdivisions": {"max_subdivs_per_device": -1},
    "with none of them": {
        "recv_buf_max_chunk": 0,
        "num_channels_per_target": 0,
        "max_subdivs_per_device": -1,
    },
}
"""Settings for ``programs/reduce_tensorflow.py`` that differ from ours."""


def contenders(count: int, env: Mapping[str, str]) -> dict[str, Callable[[], Times]]:
    def launched(strategy: str, transport: str, program: str, *rest: str) -> list[str]:
        return tfcluster(
            *("launch", "-n", str(count)),
            *("--set", f"runtime.strategy={strategy}"),
            *("--set", f"runtime.transport={transport}"),
            *("--", "python", str(PROGRAMS / program), json.dumps(SIZES), *rest),
        )

    def timed(argv: list[str]) -> Callable[[], Times]:
        return lambda: times(argv, env)

    ours = {
        name: timed(
            launched(
                "collective", "tensorflow", "reduce_tensorflow.py", json.dumps(found)
            )
        )
        for name, found in SETTINGS.items()
    }
    return {
        STRATEGY: timed(launched("none", "auto", "reduce_ring.py")),
        **ours,
        "host": timed(launched("collective", "host", "reduce_tfcluster.py")),
    }


def measure(count: int, env: Mapping[str, str]) -> dict[str, Times]:
    """The medians over rounds; every contender runs once in each round."""
    rounds: dict[str, list[Times]] = {}
    for _ in range(ROUNDS):
        for name, act in contenders(count, env).items():
            rounds.setdefault(name, []).append(act())
    return {
        name: {
            size: statistics.median(found[size] for found in several) for size in SIZES
        }
        for name, several in rounds.items()
    }


def show(count: int, found: Mapping[str, Times]) -> None:
    print(f"\n### TensorFlow's ring, float32, N = {count} ranks on one host\n")
    heads = [f"{words(size)} | times as fast" for size in SIZES]
    print(f"| transport | {' | '.join(heads)} |")
    print(f"| {' | '.join(['---'] * (1 + 2 * len(SIZES)))} |")
    for name, ours in found.items():
        cells = [name]
        for size in SIZES:
            ratio = found[STRATEGY][size] / ours[size]
            cells += [f"{ours[size] * 1e3:.2f} ms", f"{ratio:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    with state() as env:
        env |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        env["TF_NUM_INTRAOP_THREADS"] = "1"
        for count in COUNTS:
            show(count, measure(count, env))


if __name__ == "__main__":
    main()

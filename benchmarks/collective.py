"""All-reduce of float32 on one host; peers: gloo, Open MPI and TensorFlow's ring.

Times are from input tensor to output tensor. ``limit`` is the time that memory
bandwidth allows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measure import HERE, TIMEOUT_S, command, mpirun, state, tfcluster

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, MIB, 16 * MIB, 64 * MIB]
COUNTS = (2, 4)
ROUNDS = 3
PROGRAMS = HERE / "programs"

# How many times as fast as each peer tfcluster should be, by size in bytes.
TARGETS = {
    "gloo": {4 * KIB: 1.0, MIB: 3.0, 16 * MIB: 2.0, 64 * MIB: 2.0},
    "Open MPI": {16 * MIB: 0.9, 64 * MIB: 1.2},
    "TensorFlow's RING": {16 * MIB: 8.0, 64 * MIB: 10.0},
}

GRAPH = "in a tf.function"
GRAPH_TARGETS = {4 * KIB: 1.0, MIB: 2.0}
"""How many times as fast as gloo an all-reduce in a ``tf.function`` should be."""

Times = dict[int, float]


def times(argv: Sequence[str], env: Mapping[str, str]) -> Times:
    """The seconds that a program prints for each size. Raises SystemExit if none."""
    return by_size(said_by(argv, env))


def said_by(argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """The results that a program prints. Raises SystemExit if there are none."""
    done = subprocess.run(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return said_in(done.stdout, argv)


def said_in(output: str, argv: Sequence[str]) -> dict[str, Any]:
    """The results among other lines of output. Raises SystemExit if there are none."""
    for line in output.splitlines():
        if "TIMES " in line:
            found: dict[str, Any] = json.loads(line.partition("TIMES ")[2])
            return found
    raise SystemExit(f"{argv} failed:\n{output[-3000:]}")


def by_size(found: Mapping[str, float]) -> Times:
    return {int(size): seconds for size, seconds in found.items()}


def limit(copy_s: float, count: int) -> float:
    """Seconds to move the bytes, at the speed at which all ranks copy at once.

    Processes do not see each other's memory, so each rank has to copy (N-1)/N of its
    vector to shared memory, and as much of the others' results back. In between, it
    reads N parts of 1/N each and writes one part, which moves half as many bytes as
    copying (1 + 1/N) vectors.
    """
    moved = 2 * (count - 1) / count + (1 + 1 / count) / 2
    return copy_s * moved


def peers(count: int, env: Mapping[str, str]) -> dict[str, Callable[[], Times]]:
    sizes = json.dumps(SIZES)

    def program(name: str) -> list[str]:
        return [str(PROGRAMS / f"{name}.py"), sizes]

    launch = ("launch", "-n", str(count))
    none = ("--set", "runtime.strategy=none")
    mpi_env = {**env, "MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}
    torchrun = [command("torchrun"), f"--nproc-per-node={count}", "--standalone"]
    commands: dict[str, tuple[list[str], Mapping[str, str]]] = {
        "tfcluster": (
            tfcluster(*launch, "--", "python", *program("reduce_tfcluster")),
            env,
        ),
        GRAPH: (
            tfcluster(*launch, "--", "python", *program("reduce_tfcluster"), "graph"),
            env,
        ),
        "gloo": ([*torchrun, *program("reduce_gloo")], env),
        "Open MPI": (
            [*mpirun(count), sys.executable, *program("reduce_mpi")],
            mpi_env,
        ),
        "TensorFlow's RING": (
            tfcluster(*launch, *none, "--", "python", *program("reduce_ring")),
            env,
        ),
        "copy": ([sys.executable, *program("copy_times"), str(count)], env),
    }

    def timed(argv: list[str], its_env: Mapping[str, str]) -> Callable[[], Times]:
        return lambda: times(argv, its_env)

    return {name: timed(argv, its_env) for name, (argv, its_env) in commands.items()}


def measure(count: int, env: Mapping[str, str]) -> dict[str, Times]:
    """The medians over rounds; every contender runs once in each round."""
    rounds: dict[str, list[Times]] = {}
    for _ in range(ROUNDS):
        for name, act in peers(count, env).items():
            rounds.setdefault(name, []).append(act())
    return {
        name: {
            size: statistics.median(found[size] for found in several) for size in SIZES
        }
        for name, several in rounds.items()
    }


def words(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def show(count: int, found: Mapping[str, Times]) -> None:
    names = [name for name in found if name not in ("tfcluster", GRAPH, "copy")]
    print(f"\n### All-reduce of float32, N = {count} ranks on one host\n")
    heads = [f"{name} | times ours | target" for name in names]
    graph = f"{GRAPH} | gloo, times that | target"
    print(f"| size | tfcluster | {' | '.join(heads)} | share of the limit | {graph} |")
    print(f"| {' | '.join(['---'] * (6 + 3 * len(names)))} |")
    for size in SIZES:
        ours = found["tfcluster"][size]
        cells = [words(size), f"{ours * 1e3:.3f} ms"]
        for name in names:
            target = TARGETS[name].get(size)
            cells += [
                f"{found[name][size] * 1e3:.3f} ms",
                f"**{found[name][size] / ours:.2f}**",
                "" if target is None else f"{target:.1f}",
            ]
        share = limit(found["copy"][size], count) / ours
        cells.append(f"{share:.2f}" if size >= MIB else "")
        in_graph, target = found[GRAPH][size], GRAPH_TARGETS.get(size)
        cells += [
            f"{in_graph * 1e3:.3f} ms",
            f"**{found['gloo'][size] / in_graph:.2f}**",
            "" if target is None else f"{target:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    with state() as env:
        env |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        env["TF_NUM_INTRAOP_THREADS"] = "1"
        for count in COUNTS:
            show(count, measure(count, env))


if __name__ == "__main__":
    main()

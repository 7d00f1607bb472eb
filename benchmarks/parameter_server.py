"""Parameter servers: steps of workers, bare transfers, bytes, and rows of an Embedding.

They are compared with ParameterServerStrategy under a ClusterCoordinator, and with
sending a tensor over gRPC.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.collective import PROGRAMS, said_by
from benchmarks.measure import HERE, Row, show, state, tfcluster

ROUNDS = 3
NUMBERS = 10_000_000
BATCH = 32
MODELS = {"10.0 M": (2048, 30), "0.1 M": (100, 400)}
"""The number of parameters -> the width of the MLP, and the steps of an epoch."""
TRANSFER = 1 / 0.7
SPARSE = 1 / 20


def program(name: str, *more: object) -> list[str]:
    return ["python", str(PROGRAMS / f"{name}.py"), *map(str, more)]


def launch(workers: int, servers: int, argv: Sequence[str], *more: str) -> list[str]:
    tasks = ("-n", str(workers), "--ps", str(servers))
    return tfcluster("launch", *tasks, *more, "--", *argv)


def pushed(servers: int, name: str, *more: object) -> list[str]:
    """One worker that calls the client directly, so that no hook sees it train."""
    allowed = ("--set", "runtime.require_exchange=false")
    return launch(1, servers, program(name, *more), *allowed)


def coordinated(argv: Sequence[str]) -> list[str]:
    """Two workers and a ps as plain TensorFlow servers, and a chief that runs steps."""
    settings = ("runtime.strategy=none", "tasks.chief=1", "tasks.worker.server=true")
    words = [word for each in settings for word in ("--set", each)]
    return launch(2, 1, argv, *words)


def medians(
    trials: Mapping[str, Sequence[str]], what: Callable[[str], str], env: dict[str, str]
) -> dict[str, float]:
    """The medians over rounds; every contender runs once in each round."""
    found: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(ROUNDS):
        for name, argv in trials.items():
            found[name].append(said_by(argv, env)[what(name)])
    return {name: statistics.median(several) for name, several in found.items()}


def steps(env: dict[str, str]) -> list[Row]:
    rows = []
    for title, (width, steps_each) in MODELS.items():
        sizes = (width, BATCH, steps_each)
        trials = {
            "ours": launch(2, 1, program("train_parameter_server", *sizes)),
            "peer": coordinated(program("train_coordinated", *sizes)),
        }
        found = medians(trials, lambda name: "step", env)
        what = f"a worker's step, {title} parameters, 1 ps, 2 workers"
        peer = "ClusterCoordinator, loop by hand"
        rows.append(Row(what, found["ours"], peer, found["peer"], 1.0))
    return rows


def transfer(env: dict[str, str]) -> Row:
    none = ("--set", "runtime.strategy=none")
    trials = {
        "ours": pushed(1, "ps_push", NUMBERS, "none"),
        "peer": launch(1, 1, program("grpc_transfer", NUMBERS), *none),
    }
    found = medians(trials, lambda name: "push", env)
    what, peer = "40 MB to a ps and back", "a bare tensor over gRPC"
    return Row(what, found["ours"], peer, found["peer"], TRANSFER)


def rows_of_embedding(env: dict[str, str]) -> Row:
    rounds = [said_by(pushed(1, "ps_rows"), env) for _ in range(ROUNDS)]
    rows, whole = (
        statistics.median(found[name] for found in rounds) for name in ("rows", "whole")
    )
    return Row("1 % of 1 M x 64 rows", rows, "pushed as a whole", whole, SPARSE)


def main() -> None:
    with state() as env:
        env |= {
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
        }
        rows = [*steps(env), transfer(env), rows_of_embedding(env)]
        held = {
            servers: said_by(pushed(servers, "ps_push", NUMBERS, "sum"), env)
            for servers in (2, 4)
        }
    show(f"Parameter servers (median of {ROUNDS})", rows)
    for servers, found in held.items():
        print(f"\nBytes on each of {servers} ps: {found['bytes']}")


if __name__ == "__main__":
    main()

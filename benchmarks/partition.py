"""What dividing a traced step gives and costs: six models on two ranks.

Each table has medians of rounds; every contender runs once in each round, so the ratios
hold even if the machine's speed changes.

    python -m benchmarks.partition [--repeats 3] [--models mlp cnn cnn20 ...]
        [--only steps xla inference rewriting]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.collective import MIB, PROGRAMS, said_by
from benchmarks.measure import HERE, state, tfcluster
from benchmarks.trainers.workload import TASKS

RANKS = 2
REPEATS = 3
MODELS = ("mlp", "mlp_adam", "cnn", "cnn20", "lstm", "transformer")
TABLES = ("steps", "xla", "inference", "rewriting")
ALONE, HOST, TENSORFLOW = "one process", "transport host", "transport tensorflow"
WITH_XLA = ", XLA"


def argv_of(contender: str, program: str, *words: str) -> Sequence[str]:
    path = str(PROGRAMS / f"partition_{program}.py")
    if contender == ALONE:
        return [sys.executable, path, *words]
    transport = contender.removeprefix("transport ")
    return tfcluster(
        *("launch", "-n", str(RANKS), "--set", f"runtime.transport={transport}"),
        *("--", "python", path, *words),
    )


def rounds(
    trials: Mapping[str, Sequence[str]], env: Mapping[str, str], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """What each trial printed in each round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trials}
    for _ in range(repeats):
        for name, argv in trials.items():
            found[name].append(said_by(argv, env))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    return found


def ratio(
    found: Mapping[str, Sequence[Mapping[str, float]]], ours: str, peer: str, what: str
) -> float:
    """The median of a time in the same trial's of a peer's."""
    pairs = zip(found[ours], found[peer], strict=True)
    return statistics.median(own[what] / other[what] for own, other in pairs)


def head(title: str, *cells: str) -> None:
    print(f"\n### {title}\n")
    row(*cells)
    row(*["---"] * len(cells))


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def show_steps(
    models: Sequence[str],
    rewriting: Mapping[str, Mapping[str, float]],
    env: Mapping[str, str],
    repeats: int,
) -> None:
    contenders = (ALONE, HOST, TENSORFLOW)
    trials = {name: argv_of(name, "steps", *models) for name in contenders}
    found = rounds(trials, env, repeats)
    head(
        f"A step: one process with all cores, and {RANKS} ranks that share them",
        *("model", ALONE, HOST, "times that", "CPU time, times that"),
        *(TENSORFLOW, "times that", "work divided"),
        *("exchanges", "MiB exchanged"),
    )
    for model in models:
        cells = [TASKS[model].title]
        for name in contenders:
            cells.append(milliseconds(statistics.median(s[model] for s in found[name])))
            if name != ALONE:
                cells.append(f"**{ratio(found, name, ALONE, model):.2f}**")
            if name == HOST:
                cells.append(f"**{ratio(found, name, ALONE, f'{model} cpu'):.2f}**")
        seen = rewriting[model]
        row(
            *cells,
            f"{seen['share']:.1%}",
            f"{seen['exchanges']:.0f}",
            f"{seen['bytes'] / MIB:.2f}",
        )


def show_xla(models: Sequence[str], env: Mapping[str, str], repeats: int) -> None:
    contenders = (ALONE, HOST)
    trials = {
        f"{name}{suffix}": argv_of(name, "steps", *options, *models)
        for name in contenders
        for suffix, options in (("", ("--no-xla",)), (WITH_XLA, ("--xla",)))
    }
    found = rounds(trials, env, repeats)
    head("A step without and with XLA", "model", *trials, *("times without",) * 2)
    for model in models:
        times = [statistics.median(s[model] for s in found[name]) for name in trials]
        ratios = [ratio(found, f"{n}{WITH_XLA}", n, model) for n in contenders]
        row(model, *map(milliseconds, times), *(f"**{r:.2f}**" for r in ratios))


def show_inference(model: str, env: Mapping[str, str], repeats: int) -> None:
    contenders = (ALONE, HOST)
    trials = {name: argv_of(name, "inference", model) for name in contenders}
    found = rounds(trials, env, repeats)
    title = TASKS[model].title
    head(
        f"{title}: one process on one core, and {RANKS} ranks on one core each",
        *("what", ALONE, f"{RANKS} ranks", "times that"),
    )
    for what in ("evaluate", "predict"):
        times = [statistics.median(s[what] for s in found[n]) for n in contenders]
        times_that = f"**{ratio(found, HOST, ALONE, what):.2f}**"
        row(what, *map(milliseconds, times), times_that)


def show_rewriting(found: Mapping[str, Mapping[str, float]]) -> None:
    passes = ("specialise", "propagate", "rewrite")
    head(
        f"What it takes to divide a step among {RANKS} ranks",
        *("model", "ops", "tracing", *passes, "together", "an op", "of tracing"),
    )
    for model, seen in found.items():
        all_passes = sum(seen[name] for name in passes)
        row(
            TASKS[model].title,
            f"{seen['ops']:.0f}",
            milliseconds(seen["tracing"]),
            *(milliseconds(seen[name]) for name in passes),
            milliseconds(all_passes),
            f"{all_passes / seen['ops'] * 1e3:.3f} ms",
            f"**{all_passes / seen['tracing']:.2f}**",
        )


def rewriting_of(
    models: Sequence[str], env: Mapping[str, str], repeats: int
) -> dict[str, dict[str, float]]:
    """The medians of what ``programs/partition_rewriting.py`` finds for each model."""
    trials = {"rewriting": argv_of(ALONE, "rewriting", *models)}
    found = rounds(trials, env, repeats)["rewriting"]
    return {
        model: {
            what: statistics.median(each[model][what] for each in found)
            for what in found[0][model]
        }
        for model in models
    }


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    chosen = parser.parse_args(argv)
    models = chosen.models
    with state() as env:
        env["PYTHONPATH"] = str(HERE.parent)
        rewriting = rewriting_of(models, env, chosen.repeats)
        if "steps" in chosen.only:
            show_steps(models, rewriting, env, chosen.repeats)
        if "xla" in chosen.only:
            show_xla(models, env, chosen.repeats)
        if "inference" in chosen.only:
            show_inference("cnn", env, chosen.repeats)
        if "rewriting" in chosen.only:
            show_rewriting(rewriting)


if __name__ == "__main__":
    main(sys.argv[1:])

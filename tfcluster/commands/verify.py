"""The command ``verify``: compare the ranks of a program with one process of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfcluster import config
from tfcluster.commands import verify_trial
from tfcluster.commands.verify_trial import Trial, run_trial
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.views import verdict as verdict_view
from tfcluster.errors import ConfigError, ExitCode, Problem
from tfcluster.launcher.launch import check
from tfcluster.model import Description, Strategy
from tfcluster.verify import workdir_copy
from tfcluster.verify.causes import causes, of_method, own_difference
from tfcluster.verify.compare import Difference, compare
from tfcluster.verify.outputs import compare_outputs
from tfcluster.verify.scratch import Scratch, remove_abandoned
from tfcluster.verify.tolerance import tolerance
from tfcluster.verify.verdict import Failure, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of ``verify``."""

    count: int | None = None
    ps: int = 0
    steps: int = 20
    """0: to the program's end."""
    strategy: str | None = None
    tolerance: float | None = None
    """None: by the devices."""
    in_place: bool = False
    as_json: bool = False
    overrides: tuple[str, ...] = ()
    behind: int = 0
    """How many of the words follow ``--``."""


def verify(words: Sequence[str], options: Options, environ: Mapping[str, str]) -> int:
    """Compare and print the answer; 0 if the results are equal, 1 if not.

    Raises TfclusterError if a run cannot be started.
    """
    description = _described(words, options, environ)
    if not options.in_place:
        workdir_copy.require_small(description.workdir)
    remove_abandoned()
    scratch = Scratch()
    try:
        verdict = _judged(description, scratch, options, environ)
    finally:
        scratch.remove()
    if options.as_json:
        put(json.dumps(_as_json(verdict), indent=2) + "\n")
    else:
        put("".join(f"{sanitise(line)}\n" for line in verdict_view.lines(verdict)))
    return int(ExitCode.OK if verdict.equal else ExitCode.TASK_FAILED)


def _described(
    words: Sequence[str], options: Options, environ: Mapping[str, str]
) -> Description:
    overrides = list(options.overrides)
    if options.strategy is not None:
        overrides.append(f"runtime.strategy={options.strategy}")
    if not words:
        hint = "`tfcluster verify -n 2 -- python train.py`"
        raise ConfigError([Problem("verify", "nothing to verify", hint)])
    if Path(words[0]).suffix in (".yaml", ".yml"):
        if options.count is not None:
            overrides.append(f"tasks.worker={options.count}")
        if options.ps:
            overrides.append(f"tasks.ps={options.ps}")
        loaded = config.load(
            words[0], overrides=overrides, arguments=words[1:], environ=environ
        )
    else:
        loaded = config.from_command(
            words,
            count=2 if options.count is None else options.count,
            ps=options.ps,
            overrides=overrides,
            environ=environ,
            cwd=Path.cwd(),
        )
    for problem in loaded.warnings:
        _say(str(problem))
    description = loaded.description
    origins, source = description.origins, description.source
    if description.runtime.strategy is Strategy.NONE:
        where = origins.get("runtime.strategy", source)
        raise ConfigError([Problem(where, "strategy none has nothing to compare")])
    if verify_trial.size_of(description) < 2 and "ps" not in description.tasks:
        where = origins.get("tasks.worker", source)
        alone = "one rank is the baseline of the comparison"
        raise ConfigError([Problem(where, alone, "-n 2, or more")])
    # Before anything is copied: its errors name the program's own folder.
    check(verify_trial.alone(description), environ)
    return description


def _judged(
    description: Description,
    scratch: Scratch,
    options: Options,
    environ: Mapping[str, str],
) -> Verdict:
    size = verify_trial.size_of(description)
    steps = options.steps or None

    def trial(name: str, described: Description, what: str) -> Trial:
        _say(f"running the program {what}")
        place = scratch.folder / name
        place.mkdir()
        workdir = description.workdir
        if not options.in_place:
            workdir = place / "work"
            workdir_copy.copy(description.workdir, workdir)
        return run_trial(
            described,
            place,
            workdir,
            steps=steps,
            environ=environ,
            orphaned=scratch.remove,
        )

    def verdict(**found: Any) -> Verdict:
        return Verdict(size=size, strategy=description.runtime.strategy, **found)

    described, baseline = verify_trial.alone(description), ""
    alone = trial("alone", described, "alone")
    if alone.failure is not None and _may_need_servers(alone, description):
        servers = "one rank with its parameter servers, because it fails alone"
        described = verify_trial.on_one_rank(description)
        served = trial("served", described, f"on {servers}")
        if served.failure is None:
            alone, baseline = served, servers
    if alone.failure is not None:
        return verdict(failed_alone=alone.failure)
    ranks = trial("ranks", verify_trial.on_ranks(description), f"on {_ranks(size)}")
    if ranks.failure is not None:
        return verdict(failed_on_ranks=ranks.failure)
    allowed = tolerance(
        options.tolerance, alone.recorded.devices, ranks.recorded.devices
    )
    comparison = compare(alone.recorded, ranks.recorded, allowed.value)
    complete = alone.complete and ranks.complete
    first = comparison.first
    if first is None and complete:
        first = _compared_outputs(alone, ranks, description, options, allowed.value)
    other = None
    by_design = of_method(description.runtime, ranks.recorded, size)
    if first is not None and by_design is None:
        again = trial("again", described, "alone once more")
        other = compare(alone.recorded, again.recorded, allowed.value).first
        if other is None and again.complete and complete:
            other = _compared_outputs(alone, again, description, options, allowed.value)
            if other is not None and other.name == first.name:
                first = None
    return verdict(
        comparison=comparison,
        first=first,
        complete=complete,
        causes=() if first is None else _causes(first, other, ranks, description),
        tolerance=allowed,
        baseline=baseline,
        by_chance=by_design if first is None else None,
        not_compared=_not_compared(ranks),
    )


def _may_need_servers(alone: Trial, description: Description) -> bool:
    """Whether a program that failed alone may train with parameter servers.

    Graphs of ``tfc.v1`` do.
    """
    return "ps" in description.tasks and alone.recorded.steps == 0


def _causes(
    first: Difference,
    other: Difference | None,
    ranks: Trial,
    description: Description,
) -> tuple[str, ...]:
    size = verify_trial.size_of(description)
    own = own_difference(other, first)
    if own is not None:
        return (own,)
    runtime = description.runtime
    return tuple(causes(first, ranks.recorded, size, runtime, ranks.warnings))


def _compared_outputs(
    alone: Trial,
    ranks: Trial,
    description: Description,
    options: Options,
    tolerance: float,
) -> Difference | None:
    """The first difference of files and of what the chief printed."""
    logs = None if _prints_of_threads(ranks) else (alone.log, ranks.log)
    if options.in_place:
        return compare_outputs(None, None, logs, tolerance)
    before = {
        str(file.relative_to(description.workdir)): file
        for file in workdir_copy.files_below(description.workdir)
    }
    folders = alone.folder, ranks.folder
    return compare_outputs(folders, before, logs, tolerance)


def _prints_of_threads(ranks: Trial) -> bool:
    return "sync_replicas" in ranks.recorded.methods


def _not_compared(ranks: Trial) -> tuple[str, ...]:
    if not _prints_of_threads(ranks):
        return ranks.recorded.not_compared
    printed = (
        "what the chief printed (a thread of SyncReplicasOptimizer prints errors when "
        "its session ends)"
    )
    return (*ranks.recorded.not_compared, printed)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    comparison, first = verdict.comparison, verdict.first
    return {
        "equal": verdict.equal,
        "ranks": verdict.size,
        "strategy": str(verdict.strategy),
        "tolerance": verdict.tolerance.value if verdict.tolerance else None,
        "tolerance_reason": verdict.tolerance.why if verdict.tolerance else None,
        "compared_with": verdict.baseline or "one process",
        "by_chance": verdict.by_chance,
        "not_compared": list(verdict.not_compared),
        "steps": comparison.steps if comparison else 0,
        "to_the_end": verdict.complete,
        "largest_difference": comparison.largest if comparison else None,
        "compared": {
            each.kind: {"values": each.compared, "largest": each.largest}
            for each in (comparison.quantities if comparison else ())
        },
        "first_difference": None
        if first is None
        else {**asdict(first), "text": first.words()},
        "causes": list(verdict.causes),
        "failed_alone": _failure(verdict.failed_alone),
        "failed_on_ranks": _failure(verdict.failed_on_ranks),
    }


def _failure(failure: Failure | None) -> dict[str, Any] | None:
    return None if failure is None else asdict(failure)


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def _say(text: str) -> None:
    say(sanitise(text))

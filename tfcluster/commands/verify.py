"""The command ``verify``: compare a program's ranks with the program in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tfcluster.agent.gpus import gpus
from tfcluster.base.errors import ConfigError, ExitCode, Problem
from tfcluster.commands import verify_trial
from tfcluster.commands.verify_trial import Trial, run_trial
from tfcluster.console.display import DEFAULT, Display
from tfcluster.console.output import put, say, say_progress
from tfcluster.console.sanitise import sanitise
from tfcluster.console.text import plural
from tfcluster.console.views.answers import verdict_lines
from tfcluster.launcher.launch import check
from tfcluster.plan.model import Description, Strategy
from tfcluster.verify.compare import Comparison, Difference, compare, noise_of
from tfcluster.verify.noise import (
    Noise,
    deterministic_variables,
    is_nondeterministic,
    other_threads,
    tolerance,
)
from tfcluster.verify.outputs import Outputs, compare_outputs
from tfcluster.verify.scratch import (
    Scratch,
    copy_workdir,
    files_below,
    remove_abandoned,
    require_small,
)
from tfcluster.verify.verdict import (
    Verdict,
    as_json,
    causes,
    of_method,
    own_difference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    count: int | None = None
    ps: int = 0
    steps: int = 20
    """The number of steps to compare; 0: all until the program's end."""
    tolerance: float | None = None
    """None: it depends on the devices."""
    in_place: bool = False
    as_json: bool = False
    overrides: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    display: Display = DEFAULT


def verify(
    words: Sequence[str], options: VerifyOptions, environ: Mapping[str, str]
) -> int:
    """Compare and print the answer; 0: equal, 1: not equal. Raises TfclusterError."""
    description = _described(words, options, environ)
    if not options.in_place:
        require_small(description.workdir)
    remove_abandoned()
    scratch = Scratch()
    try:
        verdict = _judged(description, scratch, options, environ)
    except KeyboardInterrupt:
        say("interrupted: nothing was compared")
        raise
    finally:
        scratch.remove()
    if options.as_json:
        put(json.dumps(as_json(verdict), indent=2) + "\n")
    else:
        lines = verdict_lines(verdict, brief=options.display.quiet)
        put("".join(f"{sanitise(line)}\n" for line in lines))
    return int(ExitCode.OK if verdict.equal else ExitCode.TASK_FAILED)


def _described(
    words: Sequence[str], options: VerifyOptions, environ: Mapping[str, str]
) -> Description:
    if not words:
        hint = "`tfcluster verify -n 2 -- python train.py`"
        raise ConfigError([Problem("verify", "nothing to verify", hint)])
    description = verify_trial.described(
        words,
        environ,
        count=options.count,
        ps=options.ps,
        overrides=options.overrides,
        passed=options.passed,
    )
    origins, source = description.origins, description.source
    if description.runtime.strategy is Strategy.NONE:
        where = origins.get("runtime.strategy", source)
        raise ConfigError([Problem(where, "strategy none has nothing to compare")])
    if verify_trial.size_of(description) < 2 and "ps" not in description.tasks:
        where = origins.get("tasks.worker", source)
        alone = "one rank is the baseline of the comparison"
        raise ConfigError([Problem(where, alone, "-n 2, or more")])
    # Before anything is copied: these errors name the program's own folder.
    check(verify_trial.alone(description), environ)
    return description


def _judged(
    description: Description,
    scratch: Scratch,
    options: VerifyOptions,
    environ: Mapping[str, str],
) -> Verdict:
    size, runtime = verify_trial.size_of(description), description.runtime
    trials = _Trials(description, scratch, options, environ)

    def verdict(**results: Any) -> Verdict:
        return Verdict(size=size, strategy=runtime.strategy, **results)

    alone, described, baseline = trials.baseline()
    if alone.failure is not None:
        return verdict(failed_alone=alone.failure)
    again = None
    if options.tolerance is None:
        again = trials.run(
            "again",
            described,
            "alone again, with other threads and rounding",
            other=True,
        )
    on_ranks = verify_trial.on_ranks(description)
    ranks = trials.run("ranks", on_ranks, f"on {plural(size, 'rank')}")
    if ranks.failure is not None:
        failed = ranks.failure
        if ranks.recorded.methods and "ps" not in description.tasks:
            hint = "a graph of TensorFlow 1 trains with parameter servers: --ps 1"
            failed = replace(failed, hint=hint)
        return verdict(failed_on_ranks=failed)
    allowed = tolerance(options.tolerance, alone.recorded, ranks.recorded)
    comparison, first = trials.compared(alone, ranks, allowed.value, again)
    by_design = of_method(runtime, ranks.recorded, size)
    other = None
    unusual = first is not None or comparison.largest > allowed.value
    if unusual and by_design is None:
        # What differs in a run that is the same in every respect is no noise.
        same = trials.run("same", described, "alone once more")
        _, other = trials.compared(alone, same, allowed.value)
        if other is not None and not other.at_the_end:
            comparison, first = trials.compared(alone, ranks, allowed.value)
        if first and other and other.at_the_end and other.name == first.name:
            first = None
    return verdict(
        comparison=comparison,
        first=first,
        complete=alone.complete and ranks.complete,
        causes=() if first is None else _causes(first, other, ranks, description),
        tolerance=allowed,
        baseline=baseline,
        by_chance=by_design if first is None else None,
        not_compared=_not_compared(ranks),
    )


class _Trials:
    """Runs the variants of the program, each in a copy of its folder."""

    def __init__(
        self,
        description: Description,
        scratch: Scratch,
        options: VerifyOptions,
        environ: Mapping[str, str],
    ) -> None:
        self._description = description
        self._scratch = scratch
        self._options = options
        self._environ = environ
        own = {**environ, **description.env}
        self._deterministic = deterministic_variables(gpus(own), own)

    def run(
        self, name: str, described: Description, what: str, *, other: bool = False
    ) -> Trial:
        """Run ``described``; ``other``: with other threads and rounding errors."""
        display = self._options.display
        say_progress(f"running the program {what}", display)
        place = self._scratch.folder / name
        place.mkdir()
        workdir = described.workdir
        if not self._options.in_place:
            workdir = place / "work"
            copy_workdir(described.workdir, workdir)
        env = {**self._deterministic, **described.env}
        if other:
            env.update(other_threads({**self._environ, **env}))
        trial = run_trial(
            replace(described, env=env),
            place,
            workdir,
            steps=self._options.steps or None,
            environ=self._environ,
            orphaned=self._scratch.remove,
            moved=other,
            xla=self._description.runtime.strategy is Strategy.COLLECTIVE,
        )
        if display.everything:
            with suppress(FileNotFoundError):
                text = trial.log.read_text(encoding="utf-8", errors="replace")
                for line in text.splitlines():
                    say_progress(f"  | {sanitise(line)}", display)
        return trial

    def baseline(self) -> tuple[Trial, Description, str]:
        description = self._description
        described = verify_trial.alone(description)
        alone = self.run("alone", described, "alone")
        failed = alone.failure
        if failed is None:
            return alone, described, ""
        if self._deterministic and is_nondeterministic(failed.reason, failed.tail):
            self._deterministic = {}
            alone = self.run("anew", described, "alone, with all kernels of the GPU")
        # Graphs of ``tfc.v1`` need parameter servers.
        elif "ps" in description.tasks and alone.recorded.steps == 0:
            words = "one rank with its parameter servers, because it fails alone"
            with_servers = verify_trial.on_one_rank(description)
            served = self.run("served", with_servers, f"on {words}")
            if served.failure is None:
                return served, with_servers, words
        return alone, described, ""

    def compared(
        self, alone: Trial, other: Trial, tolerance: float, again: Trial | None = None
    ) -> tuple[Comparison, Difference | None]:
        """The comparison of steps, and the first difference in them or outputs."""
        if again is not None and again.failure is not None:
            again = None
        noise = Noise(tolerance)
        if again is not None:
            noise = noise_of(alone.recorded, again.recorded, tolerance)
        comparison = compare(alone.recorded, other.recorded, noise)
        if comparison.first is not None or not (alone.complete and other.complete):
            return comparison, comparison.first
        prints, in_place = not _prints_of_threads(other), self._options.in_place

        def outputs(trial: Trial) -> Outputs:
            folder = None if in_place else trial.folder
            return Outputs(folder, trial.log if prints else None)

        workdir = self._description.workdir
        files = () if in_place else files_below(workdir)
        before = {str(file.relative_to(workdir)): file for file in files}
        third = None if again is None else outputs(again)
        return comparison, compare_outputs(
            outputs(alone), outputs(other), third, before, tolerance
        )


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


def _prints_of_threads(ranks: Trial) -> bool:
    return "sync_replicas" in ranks.recorded.methods


def _not_compared(ranks: Trial) -> tuple[str, ...]:
    if not _prints_of_threads(ranks):
        return ranks.recorded.not_compared
    printed = "what the chief printed (a thread of SyncReplicasOptimizer prints there)"
    return (*ranks.recorded.not_compared, printed)

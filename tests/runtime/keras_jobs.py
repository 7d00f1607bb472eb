"""Runs the programs in ``programs/cases`` as one process and on 2, 3 and 4 ranks.

The default tier runs the cases of ``IN_DEFAULT_TIER``, one for each mechanism of the
runtime, on two ranks, or three where a test looks at the third. ``make test-all`` adds
those of ``IN_TEST_ALL``, and ``make test-exhaustive`` all others. To keep that quick as
well, each case runs on only one of these numbers of ranks, in turn from ``TURNS``;
cases in ``ON_ALL_SIZES`` run on all of them in ``make test-exhaustive``.
TFCLUSTER_TEST_ALL_SIZES=1 runs all cases on all of them. Each theme has jobs of its
own, which run when a test first needs them, so themes can be tested at the same time,
each by its own ``test_keras_THEME.py``.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.ranks import PROGRAMS, ROOT, Job, Jobs, Ranks

SIZES = (2, 3, 4)
TURNS = (2, 3, 2, 2)
THEMES = (
    "callbacks",
    "changed_gradients",
    "coupled_rows",
    "inputs",
    "loops",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "own_layers",
    "own_loops",
    "states",
    "step_metrics",
)
ON_ALL_SIZES = {
    "batches_of_one",
    "fit",
    "mean_by_weights",
    "tape_graph",
    "two_optimizers_compiled_by_xla",
}
ON_THREE = {
    *("random_layers", "files", "one_rank_stops", "convolutions_compiled_by_xla"),
}
"""Cases whose tests need a third rank."""
IN_DEFAULT_TIER = {
    "callbacks": [
        *("one_rank_stops", "files", "checkpoints", "unwritable", "downloads"),
        *("own_folders", "checkpoints_in_own_folders", "summaries"),
    ],
    "changed_gradients": [],
    "coupled_rows": ["mask"],
    "inputs": ["divided_loops", "fit", "predictions"],
    "loops": ["tape_graph", "tape_on_arrays", "tape_takes_batches"],
    "losses": [],
    "metrics": [],
    "models": ["batch_normalization", "several_steps_per_execution"],
    "optimizers": [],
    "own_layers": [],
    "own_loops": [
        *("rate_by_the_loss", "unlike_data", "function_between_tapes"),
        *("strategies_of_clusters", "parameter_servers", "two_replicas"),
        *("higher_gradients", "one_replica", "unlike_batches_of_one_row"),
    ],
    "per_worker": ["per_worker"],
    "states": [],
    "step_metrics": ["as_in_the_guide"],
}
"""Cases by theme."""
IN_TEST_ALL = {
    "callbacks": [
        *("early_stopping", "folders_that_others_do_not_see"),
        *("goes_on_from_a_checkpoint", "slots_assigned"),
        "writers_that_also_decide",
    ],
    "changed_gradients": [
        *("applied_in_a_conditional", "clipped_by_global_norm_in_a_graph"),
    ],
    "coupled_rows": [
        *("adversary", "function_under_an_eager_tape", "missing_targets"),
        *("similarities", "sum_of_ragged_and_sparse"),
    ],
    "inputs": [
        *("batches_of_one", "cached_in_files", "endless", "sources"),
        *("divided_augmentation", "divided_pipelines", "elements_that_differ"),
        *("errors_in_elements", "errors_in_loops", "iterators_in_checkpoints"),
        *("loops_that_differ", "whole_pipelines", "without_a_fixed_order"),
    ],
    "loops": [
        *("gan", "on_batch", "session_of_tensorflow_1", "tape_compiled_by_xla"),
        *("tape_on_ragged_rows", "tape_that_draws_for_batches_of_two_sizes"),
    ],
    "losses": [
        *("computed_by_the_model", "masked_sum", "sample_weights", "similarity"),
    ],
    "metrics": [
        *("metrics", "read_by_callbacks"),
    ],
    "models": [
        *("compiled_by_xla", "dropout", "embedding"),
        "lstm_masked",
        *("own_train_step", "positions_of_any_length"),
    ],
    "optimizers": [
        *("accumulated", "averaged_weights", "clipped", "mixed_precision"),
        "sum_overflows",
    ],
    "own_layers": [
        *("added_losses", "queue_in_variables", "states_of_rows", "transformer_layer"),
    ],
    "own_loops": [
        *("errors_that_a_loop_catches", "experimental_strategies"),
        *("learned_classes", "noise_of_numpy_in_a_step"),
        *("loss_averaged_by_an_eager_step", "rate_by_the_loss_eagerly"),
        "variable_without_an_optimizer",
    ],
    "per_worker": ["per_worker_weights"],
    "states": [
        *("kept_by_recurrent_layers", "kept_in_a_loop"),
    ],
    "step_metrics": [
        *("adversaries", "looked_at_batch_by_batch", "only_some"),
    ],
}
"""More cases by theme, for ``make test-all``. All others are exhaustive: one of these
shows their mechanism, and each rule of the partition has tests of its own."""
STRICT = {"TFCLUSTER_PARTITION": "strict"}
"""A function that cannot be divided is an error of its case."""
PER_WORKER = {"TFCLUSTER_RUNTIME": '{"batch": "per_worker"}'}

Values = Mapping[str, NDArray[Any]]


class Tier(Enum):
    """When a test runs; the value is the name of a mark, but for the first."""

    DEFAULT = "default"
    SLOW = "slow"
    EXHAUSTIVE = "exhaustive"

    @property
    def marks(self) -> Sequence[pytest.MarkDecorator]:
        return () if self is Tier.DEFAULT else (getattr(pytest.mark, self.value),)


def cases_of(theme: str) -> list[str]:
    text = (PROGRAMS / "cases" / f"{theme}.py").read_text()
    return re.findall(r"^def case_(\w+)", text, re.MULTILINE)


EVERYTHING = os.environ.get("TFCLUSTER_TEST_ALL_SIZES") == "1"
LIMIT_S = 2700 if EVERYTHING else 900
"""Time limit of each job."""


def sizes_of(theme: str, case: str, place: int) -> tuple[int, ...]:
    """Numbers of ranks. If the case is in the default tier, the first is used there."""
    sizes: tuple[int, ...] = SIZES
    if case not in ON_ALL_SIZES and not EVERYTHING:
        sizes = (3,) if case in ON_THREE else (TURNS[place % len(TURNS)],)
    if tier_of(theme, case) is not Tier.DEFAULT:
        return sizes
    first = 3 if case in ON_THREE else 2
    return (first, *(size for size in sizes if size != first))


def tier_of(theme: str, case: str) -> Tier:
    if case in IN_DEFAULT_TIER[theme]:
        return Tier.DEFAULT
    return Tier.SLOW if case in IN_TEST_ALL.get(theme, ()) else Tier.EXHAUSTIVE


CASES = {
    case: (theme, sizes_of(theme, case, place))
    for theme in THEMES
    for place, case in enumerate(cases_of(theme))
}
"""The theme of each case, and the numbers of ranks on which it runs."""
PER_WORKER_CASES = cases_of("per_worker")


def at_each_size(cases: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize ``compared`` with each case on each of its numbers of ranks."""
    return pytest.mark.parametrize(
        "compared",
        [
            pytest.param((case, size), id=f"{case}-{size}", marks=_marks(case, size))
            for case in cases
            for size in (CASES[case][1] if case in CASES else SIZES)
        ],
        indirect=True,
    )


def _marks(case: str, size: int) -> Sequence[pytest.MarkDecorator]:
    return _tier(case, size).marks


def _tier(case: str, size: int) -> Tier:
    """The tier in which a case runs on ``size`` ranks; 1 is the baseline."""
    if case in CASES:
        theme, (first, *_) = CASES[case]
        tier, is_first = tier_of(theme, case), size in (1, first)
    else:
        tier, is_first = tier_of("per_worker", case), size == 2
    return tier if is_first else Tier.EXHAUSTIVE


def job_of(case: str, size: int) -> str:
    """The name of the job that runs a case; size 1 is the one-process baseline."""
    return _job_of(CASES[case][0], size, _tier(case, size))


def _job_of(theme: str, size: int, tier: Tier) -> str:
    return f"{tier.value}-{theme}-{size}"


def _per_worker_jobs(case: str, size: int) -> tuple[str, str]:
    """The jobs of a case in one process, and on the ranks. Batches differ by size."""
    return f"{case}-1-of-{size}", f"{case}-{size}"


@dataclass(frozen=True)
class Compared:
    """The results of one case from one process and from each of ``size`` ranks."""

    size: int
    one: Values
    ranks: list[Values]


@dataclass(frozen=True)
class Outcomes:
    folder: Path
    jobs: Mapping[str, Ranks]

    def of(self, case: str) -> list[Compared]:
        """The results of a case on the first of its numbers of ranks."""
        return [self.at(case, CASES[case][1][0] if case in CASES else SIZES[0])]

    def at(self, case: str, size: int) -> Compared:
        """The results of a case on ``size`` ranks."""
        if case in CASES:
            return self._compared(case, job_of(case, 1), job_of(case, size), size)
        return self._compared(case, *_per_worker_jobs(case, size), size)

    def alone(self, case: str) -> Values:
        """The results of a case in one process, which runs only this case."""
        return self._values(f"only-{case}", 0, case)

    def said(self, case: str) -> str:
        """What the chief printed in a case, on the first of its numbers of ranks."""
        job = job_of(case, CASES[case][1][0])
        said, _, _ = self.jobs[job].outputs[0].partition(f"case_{case} done after")
        return said.rpartition(" done after ")[2]

    def folder_of(self, case: str) -> Path:
        """The working folder of a case's job, on the first of its numbers of ranks."""
        return self.jobs[job_of(case, CASES[case][1][0])].folder

    def digits(self) -> Compared:
        ranks = [self._values("digits-3", rank, "") for rank in range(3)]
        return Compared(3, self._values("digits-1", 0, ""), ranks)

    def _compared(self, case: str, alone: str, job: str, size: int) -> Compared:
        ranks = [self._values(job, rank, case) for rank in range(size)]
        return Compared(size, self._values(alone, 0, case), ranks)

    def _values(self, job: str, rank: int, case: str) -> Values:
        assert self.jobs[job]
        values = np.load(self.folder / f"{job}-{rank}.npz")
        if not case:
            return dict(values)
        start = f"{case}/"
        found = {k[len(start) :]: values[k] for k in values if k.startswith(start)}
        assert found, f"there is no case {case} in {job}"
        if "error" in found:
            raise AssertionError(str(found["error"]))
        return found


def outcomes_in(folder: Path) -> Outcomes:
    """The results of all jobs. Reading the result of a rank that failed raises."""
    jobs = []
    for theme in THEMES:
        of_theme = {
            case: sizes for case, (found, sizes) in CASES.items() if found == theme
        }
        for size in (1, *SIZES):
            for tier in Tier:
                name = _job_of(theme, size, tier)
                chosen = tuple(
                    case
                    for case, sizes in of_theme.items()
                    if size in (1, *sizes) and job_of(case, size) == name
                )
                if chosen:
                    jobs.append(_job(folder, name, size, f"cases/{theme}.py", chosen))
    for case, (theme, _) in CASES.items():
        jobs.append(_job(folder, f"only-{case}", 1, f"cases/{theme}.py", (case,)))
    script = "cases/per_worker.py"
    for size, case in itertools.product(SIZES, PER_WORKER_CASES):
        parts = {"PARTS": str(size)}
        alone, job = _per_worker_jobs(case, size)
        jobs.append(_job(folder, alone, 1, script, (case,), parts))
        parts |= PER_WORKER
        jobs.append(_job(folder, job, size, script, (case,), parts))
    digits = (str(ROOT / "examples" / "digits.py"), "--epochs", "3")
    for size in (1, 3):
        jobs.append(_job(folder, f"digits-{size}", size, "final_weights.py", digits))
    return Outcomes(folder, Jobs(folder, jobs, LIMIT_S, must_succeed=True))


def _job(
    folder: Path,
    name: str,
    size: int,
    script: str,
    args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Job:
    words = (str(folder / name), *args)
    env = {**(env or {}), **(STRICT if size > 1 and not env else {})}
    return Job(name, size, script, words, env, keep=size == 1)

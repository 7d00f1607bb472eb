"""A seed gives the same trial, however it is asked for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.rigs.chaos import programs
from tests.rigs.chaos.__main__ import wanted_by
from tests.rigs.chaos.faults import JOBS, SITES, Blame, faults
from tests.rigs.chaos.plan import Wanted, draw


def test_the_command_of_a_trial_repeats_it() -> None:
    for seed in range(300):
        trial = draw(seed, Wanted(hosts=3))
        first, again = wanted_by(shlex.split(trial.command)[3:])
        assert first == seed
        assert draw(seed, again) == trial


def test_every_fault_of_every_site_is_drawn() -> None:
    drawn = {
        (trial.site, trial.fault.name)
        for trial in (draw(seed, Wanted()) for seed in range(3000))
    }
    assert drawn == {(site, name) for site in SITES for name in faults(site)}


def test_a_share_of_the_trials_train() -> None:
    trials = [draw(seed, Wanted()) for seed in range(2000)]
    training = [trial for trial in trials if trial.program != "stub"]
    assert 100 < len(training) < 300
    assert all(trial.fault.for_training for trial in training)
    assert {trial.phase for trial in training} == {"running"}


def test_training_that_may_outlive_its_faults_ends_by_itself(tmp_path: Path) -> None:
    """No file ends such a program, so it must have few epochs."""
    harmless = (Blame.NOBODY, Blame.PERHAPS_HOST)
    seen = set()
    for seed in range(2000):
        trial = draw(seed, Wanted(site="ssh"))
        if trial.program == "stub":
            continue
        fatal = {
            fault.blame
            for fault in (trial.fault, trial.second)
            if fault is not None and fault.blame not in harmless
        }
        command = programs.write(tmp_path, trial)["command"]
        epochs = int(command[command.index("--epochs") + 1])
        assert (epochs > 100) == bool(fatal), trial
        seen.add(trial.fault.blame)
    assert seen > set(harmless)


def test_a_second_fault_follows_only_kills() -> None:
    seconds = [
        trial
        for trial in (draw(seed, Wanted()) for seed in range(2000))
        if trial.second is not None
    ]
    assert seconds
    assert all(trial.fault.kills for trial in seconds)
    assert {trial.site for trial in seconds} > set(JOBS)


def test_a_fault_that_no_site_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no site here"):
        draw(0, Wanted(fault="cut-host"), ["local"])

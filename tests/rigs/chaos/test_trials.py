"""A few trials of each site in every run of the tests; and planted defects are found.

TFCLUSTER_CHAOS_TRIALS and TFCLUSTER_CHAOS_SEED choose others. A failed test prints the
command that repeats its trial.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.waiting import eventually
from tests.rigs.chaos import strikes
from tests.rigs.chaos import trial as trials
from tests.rigs.chaos.faults import LOCAL, SGE, SLURM, SSH, Fault
from tests.rigs.chaos.plan import STUB, Trial, Wanted, draw, seeds
from tests.rigs.chaos.sites import LocalSite, RigSite, Site
from tests.rigs.chaos.strikes import Scene, Struck
from tests.rigs.testbed.commands import Unavailable

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


def passes(trial: Trial, site: Site, folder: Path) -> None:
    result = trials.run(trial, site, trial.seed, folder)
    told = "\n".join((*result.violations, trial.command, str(result.kept)))
    assert not result.violations, told


@pytest.mark.parametrize("seed", seeds(4))
def test_on_this_machine(tmp_path: Path, seed: int) -> None:
    trial = draw(seed, Wanted(site=LOCAL, program=STUB, hosts=2))
    if trial.fault.name == "full-state" and os.geteuid():
        pytest.skip("only root can mount a small disk")
    passes(trial, LocalSite(tmp_path), tmp_path)


@pytest.fixture(scope="module", params=[SSH, SLURM, SGE])
def site(request: pytest.FixtureRequest) -> Iterator[RigSite]:
    try:
        site = RigSite(request.param, 3)
    except Unavailable as error:
        pytest.skip(f"no testbed: {error}")
    yield site
    site.close()


@pytest.mark.testbed
@pytest.mark.parametrize("seed", seeds(1))
def test_on_a_rig(site: RigSite, tmp_path: Path, seed: int) -> None:
    trial = draw(seed, Wanted(site=site.name, program=STUB, hosts=3))
    passes(trial, site, tmp_path)


# --- what a defect of the product would look like -----------------------------------


def _leave_a_process(site: LocalSite) -> Callable[[], None]:
    """As if tfcluster had left a process on the host."""
    cluster = site.clusters[-1]
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=cluster.environ
    )

    def end() -> None:
        left.kill()
        left.wait()

    return end


def _damage_the_record(site: LocalSite) -> Callable[[], None]:
    (folder,) = (site.clusters[-1].state / "runs").iterdir()
    eventually((folder / "plan.json").exists, lambda: "no plan", 30)
    (folder / "plan.json").write_text("{")
    return lambda: None


@pytest.mark.parametrize(
    ("plant", "words"),
    [(_leave_a_process, "left after"), (_damage_the_record, "plan.json")],
)
def test_a_defect_is_a_violation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[LocalSite], Callable[[], None]],
    words: str,
) -> None:
    site = LocalSite(tmp_path)
    strike = strikes.strike
    ends: list[Callable[[], None]] = []

    def and_plant(fault: Fault, scene: Scene) -> Struck | None:
        struck = strike(fault, scene)
        if not ends:
            ends.append(plant(site))
        return struck

    monkeypatch.setattr(strikes, "strike", and_plant)
    monkeypatch.setattr(trials, "_CLEAN_S", 1.0)
    wanted = Wanted(site=LOCAL, fault="kill-child", program=STUB, hosts=2)
    seed = next(s for s in range(100) if draw(s, wanted).phase == "running")
    try:
        result = trials.run(draw(seed, wanted), site, seed, tmp_path / "kept")
    finally:
        for end in ends:
            end()
    assert any(words in each for each in result.violations), result.violations
    assert result.kept is not None
    assert (result.kept / "trial.json").exists()

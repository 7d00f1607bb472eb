"""Draws a trial from its seed.

Each choice has random numbers of its own: a seed gives the same trial whether the site,
the fault and the program were given or drawn.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.rigs.chaos.faults import JOBS, LOCAL, RUNNING, SITES, Fault, faults

STUB = "stub"
TRAINING = ("digits", "ps", "local_sgd")
PROGRAMS = (STUB, *TRAINING)

_SHARES = {"local": 4, "ssh": 3, "slurm": 2, "sge": 2}
_OF_TRAINING = 0.1
_OF_SECOND = 0.2


def seeds(trials: int) -> range:
    """The seeds to try: ``trials``, unless TFCLUSTER_CHAOS_TRIALS is set.

    TFCLUSTER_CHAOS_SEED is the first seed.
    """
    first = int(os.environ.get("TFCLUSTER_CHAOS_SEED", "0"))
    count = int(os.environ.get("TFCLUSTER_CHAOS_TRIALS", str(trials)))
    return range(first, first + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user has chosen; None is drawn."""

    hosts: int = 4
    site: str | None = None
    fault: str | None = None
    program: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Everything about a trial that is drawn."""

    seed: int
    site: str
    hosts: int
    program: str
    fault: Fault
    phase: str
    delay_s: float
    """From the start of the launch, or of the phase, to the strike."""
    pause_s: float | None
    target: int
    """Which host or task it strikes, modulo their number."""
    second: Fault | None = None
    gap_s: float = 0.0

    @property
    def command(self) -> str:
        """Repeats this trial."""
        words = [
            *("python", "-m", "tests.rigs.chaos", "--trials", "1"),
            *("--seed", str(self.seed), "--hosts", str(self.hosts)),
            *("--site", self.site, "--fault", self.fault.name),
            *("--program", self.program),
        ]
        return shlex.join(words)

    @property
    def tasks(self) -> tuple[str, ...]:
        if self.program == "ps":
            return (*(f"worker:{n}" for n in range(self.hosts - 1)), "ps:0")
        return tuple(f"worker:{n}" for n in range(self.hosts))


def draw(seed: int, wanted: Wanted, sites: Sequence[str] = SITES) -> Trial:
    """The trial of this seed. ``sites``: those that are possible here."""
    site = wanted.site or _site(seed, wanted.fault, sites)
    given = faults(site)[wanted.fault] if wanted.fault else None
    program = wanted.program or _program(seed, given)
    fault = faults(site)[wanted.fault or _fault(seed, site, program)]
    rng = Random(f"{seed} times")
    phases = fault.phases if program == STUB else (RUNNING,)
    # Most of what a run does, it does while it runs.
    phase = RUNNING if rng.random() < 0.6 else rng.choice(phases)
    delay_s = rng.uniform(0.0, 4.0 if phase == "start" else 1.5)
    pause_s = None if fault.pause_s is None else rng.uniform(*fault.pause_s)
    target = rng.randrange(1000)
    second, gap_s = _second(seed, site, fault, phase)
    return Trial(
        seed=seed,
        site=site,
        hosts=wanted.hosts,
        program=program,
        fault=fault,
        phase=phase,
        delay_s=delay_s,
        pause_s=pause_s,
        target=target,
        second=second,
        gap_s=gap_s,
    )


def _site(seed: int, fault: str | None, sites: Sequence[str]) -> str:
    fit = [site for site in sites if fault is None or fault in faults(site)]
    if not fit:
        raise ValueError(f"no site here can have the fault {fault}")
    return Random(f"{seed} site").choices(fit, [_SHARES[site] for site in fit])[0]


def _program(seed: int, fault: Fault | None) -> str:
    rng = Random(f"{seed} program")
    trains = rng.random() < _OF_TRAINING and (fault is None or fault.for_training)
    return rng.choice(TRAINING) if trains else STUB


def _fault(seed: int, site: str, program: str) -> str:
    fit = [f.name for f in faults(site).values() if f.for_training or program == STUB]
    return Random(f"{seed} fault").choice(fit)


def _second(
    seed: int, site: str, first: Fault, phase: str
) -> tuple[Fault | None, float]:
    """Some kills are followed by another one soon."""
    rng = Random(f"{seed} second")
    if not first.kills or phase != RUNNING or rng.random() > _OF_SECOND:
        return None, 0.0
    kills = [
        each
        for each in faults(site).values()
        if each.kills and not (site in JOBS and each.name == "kill-follower")
    ]
    longest = 1.0 if site == LOCAL else 2.0
    return rng.choice(kills), rng.uniform(0.0, longest)

"""What can break, and what must follow. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

LOCAL, SSH, SLURM, SGE = "local", "ssh", "slurm", "sge"
SITES = (LOCAL, SSH, SLURM, SGE)
JOBS = (SLURM, SGE)

START, RUNNING, END = "start", "running", "end"


class Blame(enum.Enum):
    """Whom the record must name as the first failure."""

    NOBODY = "nobody: the run goes on and succeeds"
    TASK = "the task"
    HOST = "the host"
    PERHAPS_HOST = "the host, unless the run goes on"
    ANY_HOST = "one of the hosts"
    LAUNCHER = "the launcher: the run is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault."""

    name: str
    sites: tuple[str, ...] = SITES
    blame: Blame
    phases: tuple[str, ...] = (RUNNING,)
    pause_s: tuple[float, float] | None = None
    """It is undone after a random time in this range; None: when the trial is over."""
    notice_s: float = 10.0
    """How long the first word about it may take."""
    for_training: bool = True
    """It makes sense also for programs that train."""

    @property
    def codes(self) -> frozenset[int]:
        """The exit codes that fit; -9 is that of a killed launcher."""
        return frozenset(_CODES[self.blame])

    @property
    def kills(self) -> bool:
        return self.name.startswith("kill-") and self.pause_s is None


_CODES = {
    Blame.NOBODY: (0,),
    Blame.TASK: (1,),
    Blame.HOST: (5,),
    Blame.PERHAPS_HOST: (0, 5),
    Blame.ANY_HOST: (5,),
    Blame.LAUNCHER: (-9, 5),
}

_ANY_TIME = (START, RUNNING, END)
_SILENCE_S = 35.0
"""A silent host is lost after 15 s, or 25 s if its sshd answers."""

_BRIEF = (1.0, 9.0)
_BRIEF_FOR_SLURM = (1.0, 5.0)
"""The rig's slurmctld gives a node up after 10 s."""


def faults(site: str) -> dict[str, Fault]:
    """The faults that a site can have, by name."""
    return {fault.name: fault for fault in _faults(site) if site in fault.sites}


def _faults(site: str) -> tuple[Fault, ...]:
    # The guard is what sshd, srun and qrsh wait for; a job's own host needs none.
    of_guard = {LOCAL: Blame.NOBODY, SSH: Blame.HOST}.get(site, Blame.PERHAPS_HOST)
    brief = _BRIEF_FOR_SLURM if site in JOBS else _BRIEF
    return (
        Fault(name="kill-task", blame=Blame.TASK, phases=_ANY_TIME),
        Fault(
            name="kill-child",
            blame=Blame.NOBODY,
            phases=_ANY_TIME,
            for_training=False,
        ),
        Fault(name="kill-guard", blame=of_guard, phases=_ANY_TIME),
        Fault(name="kill-agent", blame=Blame.HOST, phases=_ANY_TIME),
        Fault(name="kill-guard-agent", blame=Blame.HOST, phases=_ANY_TIME),
        Fault(name="kill-launcher", blame=Blame.LAUNCHER, phases=_ANY_TIME),
        Fault(
            name="kill-launcher-guard-agent",
            sites=(LOCAL, SSH),
            blame=Blame.LAUNCHER,
            phases=_ANY_TIME,
        ),
        Fault(name="kill-follower", sites=JOBS, blame=Blame.NOBODY),
        Fault(name="kill-session", sites=(SSH,), blame=Blame.HOST, phases=_ANY_TIME),
        Fault(name="kill-monitor", sites=(SSH,), blame=Blame.PERHAPS_HOST),
        Fault(name="kill-step", sites=JOBS, blame=Blame.HOST),
        Fault(name="kill-listener", sites=(SSH,), blame=Blame.NOBODY, pause_s=brief),
        Fault(name="stop-task", blame=Blame.NOBODY, pause_s=_BRIEF),
        Fault(name="stop-agent-briefly", blame=Blame.NOBODY, pause_s=_BRIEF),
        Fault(
            name="stop-agent",
            blame=Blame.HOST,
            pause_s=(40.0, 45.0),
            notice_s=_SILENCE_S,
        ),
        Fault(name="stop-launcher-briefly", blame=Blame.NOBODY, pause_s=_BRIEF),
        Fault(
            name="stop-launcher",
            blame=Blame.ANY_HOST,
            # The agents' lease is 30 s.
            pause_s=(40.0, 45.0),
            notice_s=60.0,
        ),
        Fault(
            name="cut-host-briefly",
            sites=(SSH, *JOBS),
            blame=Blame.NOBODY,
            pause_s=brief,
        ),
        Fault(
            name="cut-host",
            sites=(SSH, *JOBS),
            blame=Blame.HOST,
            # A scheduler would not start the job.
            phases=(START, RUNNING) if site == SSH else (RUNNING,),
            notice_s=_SILENCE_S,
        ),
        Fault(
            name="cut-launcher-briefly",
            sites=(SSH,),
            blame=Blame.NOBODY,
            pause_s=brief,
        ),
        Fault(
            name="cut-launcher",
            sites=(SSH,),
            blame=Blame.ANY_HOST,
            notice_s=_SILENCE_S,
        ),
        Fault(name="power-off", sites=(SSH,), blame=Blame.HOST, notice_s=_SILENCE_S),
        Fault(name="freeze-host", sites=(SSH,), blame=Blame.NOBODY, pause_s=brief),
        Fault(name="slow-host", sites=(SSH,), blame=Blame.NOBODY, pause_s=(5.0, 10.0)),
        Fault(
            name="full-state",
            sites=(LOCAL,),
            blame=Blame.NOBODY,
            pause_s=(1.0, 5.0),
            for_training=False,
        ),
        Fault(
            name="full-logs",
            sites=(SSH,),
            blame=Blame.NOBODY,
            pause_s=(1.0, 5.0),
            for_training=False,
        ),
        Fault(
            name="kill-controller", sites=JOBS, blame=Blame.NOBODY, pause_s=(2.0, 8.0)
        ),
        Fault(
            name="freeze-controller",
            sites=JOBS,
            blame=Blame.NOBODY,
            pause_s=(2.0, 15.0),
        ),
        Fault(name="kill-daemon", sites=JOBS, blame=Blame.NOBODY, pause_s=(1.0, 5.0)),
        Fault(name="freeze-daemon", sites=JOBS, blame=Blame.NOBODY, pause_s=(1.0, 5.0)),
    )

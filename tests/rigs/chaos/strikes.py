"""Breaks things, and undoes what is to be temporary. Judges nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.cluster import Cluster, Running
from tests.rigs.chaos.faults import SLURM, Blame, Fault
from tests.rigs.chaos.plan import Trial
from tests.rigs.chaos.sites import RigSite, Site
from tests.rigs.testbed import Host
from tests.rigs.testbed.commands import RigError, check, run
from tests.rigs.testbed.processes import Process

_FULL_BYTES = 512 * 1024


def _nothing() -> None:
    pass


@dataclass(slots=True, kw_only=True)
class Struck:
    """What was hit. ``undo`` ends the fault; it may be called twice.

    ``host``: the host that the record must name; None if it cannot be told from others.
    """

    what: str
    host: str | None = None
    task: str | None = None
    undo: Callable[[], None] = field(default=_nothing)


@dataclass(slots=True)
class Scene:
    """A trial that is going on."""

    trial: Trial
    site: Site
    cluster: Cluster
    running: Running

    @property
    def host(self) -> str:
        return self.site.hosts[self.trial.target % len(self.site.hosts)]

    @property
    def rig_host(self) -> Host:
        return self.rig_site.rig.host(self.host)

    @property
    def rig_site(self) -> RigSite:
        assert isinstance(self.site, RigSite)
        return self.site

    @property
    def folder(self) -> Path | None:
        """The run's folder, once there is one."""
        runs = self.cluster.run_ids()
        return self.cluster.state / "runs" / runs[0] if runs else None

    def task(self) -> tuple[str, str, Process] | None:
        """One of the running tasks, its host and its process."""
        if self.folder is None:
            return None
        self.running.adopt(self.folder.name)
        pids: dict[str, tuple[str, int]] = {}
        for event in self.running.found("task"):
            name = str(event["task"])
            if event.get("state") == "running" and event.get("pid"):
                pids[name] = (str(event.get("host")), int(event["pid"]))
            elif event.get("state") not in (None, "running"):
                pids.pop(name, None)
            elif event.get("pid") and event.get("state") is None:
                pids[name] = (str(event.get("host")), int(event["pid"]))
        names = sorted(pids)
        for at in range(len(names)):
            name = names[(self.trial.target + at) % len(names)]
            host, pid = pids[name]
            host = self._known(host, name)
            for process in self.site.processes(self.cluster, host):
                if process.inside_pid == pid:
                    return name, host, process
        return None

    def _known(self, host: str, task: str) -> str:
        short = host.partition(".")[0]
        if short in self.site.hosts:
            return short
        for planned in self.running.plan()["tasks"]:
            if planned["task"] == task:
                return str(planned["host"]).partition(".")[0]
        return self.site.hosts[0]


def prepare(scene_folder: Path, fault: Fault, site: Site, host: str) -> None:
    """What a fault needs before the launch: disks of their own, that can be filled."""
    state = scene_folder / "state"
    if fault.name == "full-state":
        state.mkdir(mode=0o700)
        mount(state)
    elif fault.name == "full-logs" and isinstance(site, RigSite):
        folder = site.rig.accounts["alice"]
        state.mkdir(mode=0o700)
        os.chown(state, folder.number, folder.number)
        site.rig.host(host).filesystem.limit(state, _FULL_BYTES)


def mount(folder: Path) -> None:
    """Mount a small disk on a folder of this machine. Needs root."""
    options = f"size={_FULL_BYTES},mode=700"
    check(("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)))


def unmount(folder: Path) -> None:
    run(("umount", "-l", str(folder)))


def strike(fault: Fault, scene: Scene) -> Struck | None:
    """Break something now; None if there is nothing (yet) that it could hit."""
    kind, _, rest = fault.name.partition("-")
    rest = rest.removesuffix("-briefly")
    if kind in ("kill", "stop") and rest != "listener":
        return _strike_processes(kind, rest, fault, scene)
    if kind == "freeze" and rest in ("controller", "daemon"):
        return _strike_processes("stop", rest, fault, scene)
    return _OTHERS[f"{kind}-{rest}"](scene)


# --- processes ----------------------------------------------------------------------


def _strike_processes(
    kind: str, victims: str, fault: Fault, scene: Scene
) -> Struck | None:
    if victims == "task":
        found = scene.task()
        if found is None:
            return None
        task, host, process = found
        struck = _hit(kind, [process.pid])
        return Struck(
            what=f"{kind} {task} on {host}", host=host, task=task, undo=struck
        )
    if victims == "step":
        return _strike_step(scene)
    if victims == "controller" and kind == "kill" and scene.site.name == SLURM:
        slurm = scene.rig_site.rig.slurm
        if slurm is None or not slurm.has_saved(f"chaos-{scene.trial.seed}"):
            return None
    pids: list[int] = []
    for each in victims.split("-"):
        some = _pids(each, scene)
        if not some and victims != "launcher-guard-agent":
            return None
        pids += some
    if not pids:
        return None
    named = scene.host if fault.blame in (Blame.HOST, Blame.PERHAPS_HOST) else None
    if victims == "child":
        named = None
    undo = _hit(kind, pids, scene.running if victims == "launcher" else None)
    if victims in ("controller", "daemon") and kind == "kill":
        undo = _daemon_host(victims, scene).restart_dead_services
    return Struck(what=f"{kind} {victims} {pids} ({scene.host})", host=named, undo=undo)


def _pids(victims: str, scene: Scene) -> list[int]:
    site, running = scene.site, scene.running
    if victims == "launcher":
        return site.launcher(running)
    if victims == "follower":
        return site.client(running)
    if victims in ("controller", "daemon"):
        return [p.pid for p in _daemons(victims, scene)]
    roles = site.roles(scene.cluster, scene.host)
    return {
        "guard": roles.guards,
        "agent": roles.agents,
        "child": roles.others[:1],
        # The user's process of sshd holds the connection; its parent, which is root's,
        # is needed for little once the user has logged in.
        "session": sorted(roles.sessions)[-1:],
        "monitor": sorted(roles.sessions)[:1],
    }[victims]


def _strike_step(scene: Scene) -> Struck | None:
    """Kill the launcher's end of the connection to an agent's host."""
    hosts = scene.site.hosts
    leading = [
        (process, other)
        for host in hosts
        for process in scene.site.processes(scene.cluster, host)
        for other in hosts
        if _leads_to(process.argv, other)
    ]
    # srun has a child with the same words, which only cancels the step if srun dies.
    pids = {process.pid for process, _ in leading}
    found = [(each.pid, other) for each, other in leading if each.parent not in pids]
    if not found:
        return None
    pid, host = found[scene.trial.target % len(found)]
    undo = _hit("kill", [pid])
    return Struck(what=f"kill step [{pid}] to {host}", host=host, undo=undo)


def _leads_to(argv: Sequence[str], host: str) -> bool:
    words = list(argv)
    if not words:
        return False
    program = words[0].rpartition("/")[2]
    if program == "srun":
        return f"--nodelist={host}" in words
    if program.startswith("qrsh") and "-inherit" in words:
        after = words[words.index("-inherit") + 1 :]
        return after[:1] != [] and after[0].partition(".")[0] == host
    return False


def _daemon_host(victims: str, scene: Scene) -> Host:
    rig = scene.rig_site.rig
    return rig.host("head" if victims == "controller" else scene.host)


def _daemons(victims: str, scene: Scene) -> list[Process]:
    slurm = scene.site.name == SLURM
    if victims == "controller":
        name = "slurmctld" if slurm else "sge_qmaster"
    else:
        name = "slurmd" if slurm else "sge_execd"
    return [
        process
        for process in _daemon_host(victims, scene).processes()
        if process.argv[:1] and process.argv[0].rpartition("/")[2] == name
    ]


def _hit(
    kind: str, pids: list[int], launcher: Running | None = None
) -> Callable[[], None]:
    """Kill or stop all at once: none of them may react to the death of another.

    ``launcher``: the launch whose client is among them.
    """
    if kind == "kill":
        # All but the first: a launcher that is stopped would stop ``nsenter``, too.
        for pid in pids[1:]:
            _signal(pid, signal.SIGSTOP)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        return _nothing
    for pid in pids:
        _signal(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            _signal(pid, signal.SIGCONT)
        # ``nsenter`` stops with the program that it has started.
        if launcher is not None and launcher.process.poll() is None:
            _signal(launcher.process.pid, signal.SIGCONT)

    return go_on


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# --- hosts, cables, disks -----------------------------------------------------------


def _cut(host: Host, named: str | None) -> Struck:
    host.cable.cut()
    return Struck(what=f"cut {host.name}", host=named, undo=host.cable.heal)


def _cut_host(scene: Scene) -> Struck:
    host = scene.rig_host
    here = {process.pid for process in host.processes()}
    # The launcher of a job that is cut off itself finds all other hosts silent.
    itself = here & set(scene.site.launcher(scene.running))
    return _cut(host, None if itself else host.name)


def _power_off(scene: Scene) -> Struck:
    host = scene.rig_host
    host.power_off()
    return Struck(what=f"power off {host.name}", host=host.name)


def _freeze(scene: Scene) -> Struck:
    host = scene.rig_host
    host.freeze()
    return Struck(what=f"freeze {host.name}", undo=host.thaw)


def _slow(scene: Scene) -> Struck:
    host = scene.rig_host
    host.cable.limit(128)
    return Struck(what=f"limit {host.name} to 128 kbit/s", undo=host.cable.unlimit)


def _listener(scene: Scene) -> Struck:
    host = scene.rig_host
    host.sshd.stop()
    return Struck(what=f"kill the sshd of {host.name}", undo=host.sshd.repair)


def _full_state(scene: Scene) -> Struck:
    filler = scene.cluster.state / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return Struck(
        what="fill the state folder", undo=lambda: filler.unlink(missing_ok=True)
    )


def _full_logs(scene: Scene) -> Struck:
    disk, state = scene.rig_host.filesystem, scene.cluster.state
    disk.fill(state)

    def drain() -> None:
        with suppress(RigError):
            disk.drain(state)

    return Struck(what=f"fill the logs of {scene.host}", undo=drain)


_OTHERS: dict[str, Callable[[Scene], Struck]] = {
    "kill-listener": _listener,
    "cut-host": _cut_host,
    "cut-launcher": lambda scene: _cut(scene.rig_site.rig.login, None),
    "power-off": _power_off,
    "freeze-host": _freeze,
    "slow-host": _slow,
    "full-state": _full_state,
    "full-logs": _full_logs,
}

"""One host of a rig: runs programs on it and injects faults."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.rigs.testbed import processes
from tests.rigs.testbed.accounts import Account
from tests.rigs.testbed.addresses import Station
from tests.rigs.testbed.commands import CommandFailed, RigError, run
from tests.rigs.testbed.daemons import PATH, Daemon, InsideProcess
from tests.rigs.testbed.filesystem import Filesystem
from tests.rigs.testbed.firewall import Firewall
from tests.rigs.testbed.namespaces import Namespaces, Setup, start
from tests.rigs.testbed.network import Cable
from tests.rigs.testbed.processes import Process
from tests.rigs.testbed.sshd import Sshd


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Settings that all hosts of a rig share."""

    path: Path
    ground: Namespaces
    accounts: Mapping[str, Account]
    authorized: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the site's profile would set for every user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """The user, folder and environment of a program."""

    user: str = "root"
    cwd: Path | None = None
    """None means the user's home."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Overrides the site's; this machine's environment is not passed on."""


class Host:
    """A host; programs can run on it only while it has power.

    ``cable``, ``firewall``, ``sshd`` and ``filesystem`` inject most of the faults.
    """

    def __init__(
        self,
        site: Site,
        station: Station,
        setup: Setup,
        on_power: Callable[[], None] = lambda: None,
    ) -> None:
        self._site = site
        self._setup = setup
        self._on_power = on_power
        self._way_in: subprocess.Popen[bytes] | None = None
        self._services: list[Daemon] = []
        self.namespaces: Namespaces | None = None
        self.station = station
        self.folder = site.path / "hosts" / station.name
        self.cable = Cable(site.ground, station, self.where)
        self.filesystem = Filesystem(self.where, self.folder / "etc_hosts")
        self.firewall = Firewall(self.where)
        self.sshd = Sshd(self.where, self.folder, site.authorized, site.env)

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    @property
    def name(self) -> str:
        return self.station.name

    @property
    def address(self) -> str:
        return self.station.ipv4

    @property
    def alive(self) -> bool:
        return self.namespaces is not None and self.namespaces.alive

    def where(self) -> Namespaces:
        """The host's namespaces. Raises RigError while it has no power."""
        if self.namespaces is None or not self.namespaces.alive:
            raise RigError(f"{self.name} has no power")
        return self.namespaces

    # Programs.

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program here to its end, whatever its exit code.

        Raises RigError if it does not end in time; its descendants are then killed.
        """
        login = Login(user=user, cwd=cwd, env=env or {})
        return run(self.argv(argv, login), stdin=stdin, timeout_s=timeout_s)

    def output(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> str:
        """The output of a program. Raises CommandFailed if the program fails."""
        done = self.run(argv, user=user, cwd=cwd, env=env, timeout_s=timeout_s)
        if done.returncode:
            output = done.stdout + done.stderr
            raise CommandFailed([f"{self.name}:", *argv], done.returncode, output)
        return done.stdout

    def popen(
        self,
        argv: Sequence[str],
        *,
        login: Login | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.STDOUT,
    ) -> InsideProcess:
        """Start a program here, which ends with the host at the latest."""
        full = self.argv(argv, login or Login())
        return InsideProcess(full, stdin=stdin, stdout=stdout, stderr=stderr)

    def argv(self, argv: Sequence[str], login: Login) -> tuple[str, ...]:
        """The argv that, run on this machine, runs ``argv`` on the host."""
        account = self._site.accounts[login.user]
        who = f"{account.number}"
        become = ("setpriv", "--reuid", who, "--regid", who, "--init-groups", "--")
        words = [f"{k}={v}" for k, v in self._environment(account, login).items()]
        within = ("env", "-i", "-C", str(login.cwd or account.home), *words)
        return self.where().enter(*become, *within, *argv)

    def _environment(self, account: Account, login: Login) -> dict[str, str]:
        own = {"HOME": str(account.home), "USER": account.name, "SHELL": "/bin/bash"}
        common = {"PATH": PATH, "LANG": "C.UTF-8", "LOGNAME": account.name}
        return {**common, **own, **self._site.env, **login.env}

    def processes(self, marker: str | None = None) -> list[Process]:
        """The host's processes; with ``marker``, those with this ``NAME[=value]``."""
        return processes.processes(self.where().pid, marker) if self.alive else []

    # Power.

    def power_on(self) -> None:
        """Start the host and its services; returns before they are ready."""
        if self.alive:
            raise RigError(f"{self.name} is on already")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.namespaces, self._way_in = start(
            self._setup, within=self._site.ground, log=self.folder / "init.log"
        )
        self.cable.plug()
        self._on_power()
        self.sshd.start()
        for service in self._services:
            service.start(self.namespaces)

    def power_off(self) -> None:
        """Cut the cable before the processes end, so that peers get no FIN or RST."""
        self.cable.cut()
        self.where().end()
        self.cable.unplug()
        self.reap()
        self._on_power()

    def serve(self, service: Daemon) -> None:
        """Start a daemon, and start it again whenever the host starts."""
        self._services.append(service)
        service.start(self.where())

    def _restart_services(self) -> None:
        for service in self._services:
            service.stop()
            service.start(self.where())

    def restart_dead_services(self) -> None:
        """Start the daemons again that somebody has killed."""
        for service in self._services:
            if not service.alive:
                service.stop()
                service.start(self.where())

    def reap(self) -> None:
        """Wait for the ``nsenter`` processes that led into the ended host."""
        for service in self._services:
            service.stop()
        self.sshd.stop()
        if self._way_in is not None:
            self._way_in.wait(10)
            self._way_in = None
        self.filesystem.forget()
        self.namespaces = None

    # Faults.

    def freeze(self) -> None:
        """Stop every process, as on a host that swaps; the kernel still answers."""
        processes.freeze(self.where().pid)

    def thaw(self) -> None:
        processes.thaw(self.where().pid)

    def repair(self) -> None:
        """Undo every fault; returns before all services are ready again."""
        if not self.alive:
            self.power_on()
        self.thaw()
        self.cable.heal()
        self.cable.unlimit()
        self.cable.undrop()
        self.firewall.open()
        if self.filesystem.repair():
            self._restart_services()
        self.restart_dead_services()
        self.sshd.repair()

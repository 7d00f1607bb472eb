"""A whole rig: starts it, finds its hosts and takes it down."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.rigs.testbed import (
    accounts,
    layout,
    namespaces,
    network,
    packages,
    record,
    sge,
)
from tests.rigs.testbed import slurm as slurm_files
from tests.rigs.testbed.addresses import Station, hosts_file, stations
from tests.rigs.testbed.commands import RigError
from tests.rigs.testbed.host import Host, Site
from tests.rigs.testbed.namespaces import Namespaces, Setup
from tests.rigs.testbed.record import Record
from tests.rigs.testbed.sge import GridEngine
from tests.rigs.testbed.slurm import Slurm
from tests.rigs.testbed.sshd import ssh_config, system_ssh_config

# More would not be faster on a small machine.
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The hosts and services that a rig gets."""

    nodes: int = 4
    slurm: bool = False
    sge: bool = False
    private_home: frozenset[str] = frozenset()
    """Hosts that do not share the homes; each has its own empty ones."""
    shared: tuple[Path, ...] = ()
    """Folders that all hosts share even below folders that each host has for itself."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of packages that the rig needs."""
        more = (("slurm", self.slurm), ("sge", self.sge))
        return ("ssh", *(group for group, wanted in more if wanted))

    def __post_init__(self) -> None:
        known = {station.name for station in self.stations}
        if unknown := self.private_home - known:
            raise RigError(f"no such host: {' '.join(sorted(unknown))}")

    @property
    def stations(self) -> tuple[Station, ...]:
        return stations(self.nodes, with_head=self.slurm or self.sge)


class Testbed:
    """A running rig. Use it in a ``with`` statement, or call ``down`` at the end.

    It also ends with the process that started it, unless that calls ``keep``.
    """

    __test__ = False  # not a test class, despite its name

    def __init__(
        self,
        path: Path,
        options: Options,
        ground: Namespaces,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._options = options
        self._ground = ground
        self._process = process
        self._saving = threading.Lock()
        self._creator = record.read(path).creator
        self.path = path
        self.accounts = accounts.accounts(path / "home")
        site = Site(
            path=path,
            ground=ground,
            accounts=self.accounts,
            authorized=path / "authorized",
            env=sge.ENV if options.sge else {},
        )
        self._hosts = {
            each.name: Host(site, each, self._setup(each), self._save)
            for each in options.stations
        }
        scheduler = path, self._hosts.get("head", self.login), self.nodes
        self.slurm = Slurm(*scheduler) if options.slurm else None
        self.sge = GridEngine(*scheduler) if options.sge else None

    @classmethod
    def up(cls, options: Options | None = None, *, name: str | None = None) -> Testbed:
        """Start a rig and wait until all of it can be used.

        Raises Unavailable if this machine cannot run it, and RigError if a part does
        not start; nothing is left of the rig then.
        """
        wanted = options or Options()
        packages.check_root()
        namespaces.check_possible()
        packages.require(wanted.groups)
        path = record.claim(name or f"{os.getpid()}-{secrets.token_hex(3)}")
        try:
            _write_files(path, wanted)
            ground, process = namespaces.start(
                _ground_setup(path, wanted), within=None, log=path / "init.log"
            )
        except BaseException:
            shutil.rmtree(path)
            raise
        rig = cls(path, wanted, ground, process)
        try:
            rig._start()
        except BaseException:
            rig.down()
            raise
        return rig

    @classmethod
    def attach(cls, name: str) -> Testbed:
        """A rig that another process has started. Raises RigError if there is none.

        Its daemons cannot be started or stopped through the returned object.
        """
        path = record.FOLDER / name
        found = record.read(path)
        if found.ground is None or not found.ground.alive:
            raise RigError(f"the rig {name} is not up")
        known = found.options
        options = Options(
            nodes=known["nodes"], slurm=bool(known["slurm"]), sge=bool(known["sge"])
        )
        rig = cls(path, options, found.ground)
        for host in rig.hosts:
            host.namespaces = found.hosts.get(host.name)
        return rig

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(self._hosts.values())

    @property
    def login(self) -> Host:
        """The host from which users launch; it has no slurmd and no execd."""
        return self._hosts["login"]

    @property
    def nodes(self) -> tuple[Host, ...]:
        """node1, node2, ..."""
        return tuple(h for h in self.hosts if h.name.startswith("node"))

    def host(self, name: str) -> Host:
        """The host of this name. Raises RigError, with the existing names."""
        if name not in self._hosts:
            raise RigError(f"no host {name}, but {' '.join(self._hosts)}")
        return self._hosts[name]

    @property
    def ssh_config(self) -> Path:
        """A file for ``ssh -F``: never prompts, trusts only this rig's hosts."""
        return self.path / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.path / "known_hosts"

    def ssh(
        self, host: str, script: str, config: Path | None = None
    ) -> tuple[str, ...]:
        """The argv that, run on a host of the rig, runs ``script`` on ``host``."""
        return ("ssh", "-F", str(config or self.ssh_config), host, script)

    def repair(self) -> None:
        """Undo every fault of every host, and wait until all can be used again."""
        for host in self.hosts:
            host.repair()
        self._wait_ready()

    def keep(self) -> None:
        """Let it outlive this process, until it is taken down by its name."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"keep")
            self._process.stdin.close()

    def down(self) -> None:
        """End every process, wait until they are gone, and remove the files."""
        on = (host.namespaces for host in self.hosts)
        nested = [each for each in on if each is not None]
        self._ground.end(*nested)
        for host in self.hosts:
            host.reap()
        if self.slurm is not None:
            self.slurm.stop()
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(10)
        # May have been called before.
        shutil.rmtree(self.path, ignore_errors=True)

    def _start(self) -> None:
        self._save()
        network.make_bridge(self._ground)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for done in [pool.submit(host.power_on) for host in self.hosts]:
                done.result()
        lines = (host.sshd.known_hosts_line(host.station) for host in self.hosts)
        self.known_hosts.write_text("".join(lines))
        if self.slurm is not None:
            self.slurm.start(self._ground)
        if self.sge is not None:
            self.sge.start()
        self._wait_ready()

    def _wait_ready(self) -> None:
        for host in self.hosts:
            host.sshd.wait_ready()
        if self.slurm is not None:
            self.slurm.wait_ready()
        if self.sge is not None:
            self.sge.wait_ready()

    def _setup(self, station: Station) -> Setup:
        own = station.name in self._options.private_home
        return layout.host_setup(
            station.name,
            hosts_file=self.path / "hosts" / station.name / "etc_hosts",
            keep=layout.needed(self.path, self._options.shared),
            private_homes=self.accounts.values() if own else (),
        )

    def _save(self) -> None:
        with self._saving:
            on = {h.name: h.namespaces for h in self.hosts if h.namespaces is not None}
            known = {n: getattr(self._options, n) for n in ("nodes", "slurm", "sge")}
            record.write(self.path, Record(self._creator, known, self._ground, on))


def _write_files(path: Path, options: Options) -> None:
    every = accounts.accounts(path / "home")
    accounts.make_homes(every, path / "authorized")
    etc = path / "etc"
    etc.mkdir()
    accounts.write_files(etc, every)
    (etc / "ssh_config").write_text(system_ssh_config(path / "known_hosts"))
    (path / "ssh_config").write_text(ssh_config(path / "known_hosts"))
    names = hosts_file(options.stations)
    for station in options.stations:
        folder = path / "hosts" / station.name
        folder.mkdir(parents=True)
        (folder / "etc_hosts").write_text(names)
    if options.slurm:
        slurm_files.prepare(path, options.nodes)
    if options.sge:
        sge.prepare(path)


def _ground_setup(path: Path, options: Options) -> Setup:
    etc = path / "etc"
    binds = [
        (str(etc / name), f"/etc/{name}") for name in ("passwd", "group", "shadow")
    ]
    binds.append((str(etc / "ssh_config"), "/etc/ssh/ssh_config"))
    if options.slurm:
        binds.extend(slurm_files.binds(path))
    if options.sge:
        binds.extend(sge.binds(path))
    return Setup(
        hostname="ground",
        binds=tuple(binds),
        masks=layout.opened(layout.needed(path, options.shared)),
        leased=True,
    )

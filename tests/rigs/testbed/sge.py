"""A real Grid Engine on a rig: sge_qmaster on the head, an sge_execd on each node.

Every rig has its own cell, mounted where the packages expect it. The queue is
``all.q``; the parallel environments are ``tf``, ``tf_fill`` and ``tf_2``, see
``sge_texts``.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tests.rigs.testbed import sge_texts
from tests.rigs.testbed.commands import RigError, last_lines, wait_until
from tests.rigs.testbed.daemons import Daemon
from tests.rigs.testbed.host import Host

_ROOT = Path("/var/lib/gridengine")
_CELL = _ROOT / "default"
_SPOOL = Path("/var/spool/gridengine")
_DEFAULTS = Path("/usr/share/gridengine")
_PROGRAMS = Path("/usr/lib/gridengine")
_ADMIN = "sgeadmin"
_READY_S = 60.0
_TRIES = 3

ENV = {"SGE_ROOT": str(_ROOT), "SGE_CELL": _CELL.name}
"""Variables that every user of Grid Engine has set."""

# Without it, the daemons would fork into the background.
_FOREGROUND = {**ENV, "SGE_ND": "1"}


def binds(rig: Path) -> tuple[tuple[str, str], ...]:
    """Mounts that the rig needs; ``prepare`` makes their sources."""
    folder = rig / "sge"
    return (str(folder / "cell"), str(_CELL)), (str(folder / "spool"), str(_SPOOL))


def prepare(rig: Path) -> None:
    """Make an empty cell and an empty spool folder."""
    cell, spool = rig / "sge" / "cell", rig / "sge" / "spool"
    common = cell / "common"
    for each in (common, spool / "qmaster" / "job_scripts", spool / "execd"):
        each.mkdir(parents=True)
    _CELL.mkdir(exist_ok=True)  # the mount point
    (common / "bootstrap").write_text(
        sge_texts.bootstrap(admin=_ADMIN, spool=_SPOOL, common=_CELL / "common")
    )
    (common / "act_qmaster").write_text("head\n")
    defaults = (_DEFAULTS / "default-configuration").read_text()
    config = sge_texts.changed(defaults, sge_texts.GLOBAL)
    (rig / "sge" / "global").write_text(config)
    admin = pwd.getpwnam(_ADMIN)
    for path in chain(_tree(cell), _tree(spool)):
        os.chown(path, admin.pw_uid, admin.pw_gid)


def _tree(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")


class GridEngine:
    """The Grid Engine daemons of a rig."""

    def __init__(self, rig: Path, head: Host, nodes: Sequence[Host]) -> None:
        self._folder = rig / "sge"
        self._head = head
        self._nodes = tuple(nodes)
        self._execds: dict[Host, Daemon] = {}

    def start(self) -> None:
        """Start the qmaster, configure it, and start the execds."""
        self._make_spool()
        log = self._head.folder / "sge_qmaster.log"
        qmaster = Daemon(("sge_qmaster",), log, _FOREGROUND)
        self._head.serve(qmaster)
        try:
            qmaster.wait_ready(self._answers, _READY_S)
            self._configure()
        except RigError as error:
            raise RigError(f"{error}\n{self._messages(self._head)}") from error
        for node in self._nodes:
            log = node.folder / "sge_execd.log"
            self._execds[node] = Daemon(("sge_execd",), log, _FOREGROUND)
            node.serve(self._execds[node])

    def wait_ready(self) -> None:
        """Wait until every execd reports. Raises RigError with the end of the logs."""
        for left in reversed(range(_TRIES)):
            try:
                wait_until(lambda: not self._late(), "execds", _READY_S, poll_s=0.1)
            except RigError as error:
                late = self._late()
                if left == 0:
                    raise RigError(self._story(late)) from error
                # The qmaster may have rejected the first try of an execd as a duplicate
                # if its host came back; the second would follow only after a minute.
                for node in late:
                    self._execds[node].stop()
                    self._execds[node].start(node.where())

    def _late(self) -> list[Host]:
        """Nodes whose execd has not registered since its start, or does not report."""
        reporting = self.reporting()
        return [
            node
            for node, execd in self._execds.items()
            if node.name not in reporting or "registered at qmaster" not in execd.said
        ]

    def _story(self, late: list[Host]) -> str:
        names = " ".join(each.name for each in late)
        logs = "\n".join(self._messages(each) for each in (self._head, *late[:1]))
        return f"Grid Engine: no report from {names}\n{logs}"

    def reporting(self) -> set[str]:
        """Nodes to which the qmaster would give a job now.

        The qmaster has full host names; the returned names end at the first dot.
        """
        shown = self._head.run(("qstat", "-f")).stdout.splitlines()
        rows = (line.split() for line in shown if line.startswith("all.q@"))
        # A sixth column is a bad state: unheard, alarm, disabled, error.
        names = (row[0] for row in rows if len(row) == 5)
        return {name.removeprefix("all.q@").split(".")[0] for name in names}

    def messages(self) -> str:
        """The ends of the logs of all daemons."""
        return "\n".join(self._messages(each) for each in (self._head, *self._nodes))

    def _answers(self) -> bool:
        return self._head.run(("qconf", "-sh")).returncode == 0

    def _make_spool(self) -> None:
        """Do what the package's script does, with text files as the database."""
        place = f"{_CELL}/common;{_SPOOL}/qmaster"
        init = (str(_PROGRAMS / "spoolinit"), "classic", "libspoolc", place, "init")
        defaults = str(_PROGRAMS / "spooldefaults")
        resources = _DEFAULTS / "util" / "resources"
        for argv in (
            init,
            (defaults, "configuration", str(self._folder / "global")),
            (defaults, "complexes", str(resources / "centry")),
            (defaults, "usersets", str(resources / "usersets")),
            (defaults, "managers", _ADMIN, "root"),
        ):
            become = ("setpriv", f"--reuid={_ADMIN}", f"--regid={_ADMIN}")
            self._head.output((*become, "--clear-groups", "--", *argv))

    def _configure(self) -> None:
        names = [node.name for node in self._nodes]
        self._qconf("-ah", ",".join((*names, "login")))
        self._qconf("-as", ",".join((*names, "login")))
        for name in names:
            self._tell("-Ae", sge_texts.exec_host(name))
        self._tell("-Ahgrp", sge_texts.host_group(names))
        for name, rule in sge_texts.PARALLEL_ENVIRONMENTS.items():
            self._tell("-Ap", sge_texts.parallel_environment(name, rule))
        self._tell("-Aq", sge_texts.queue())
        scheduler = self._qconf("-ssconf")
        self._tell("-Msconf", sge_texts.changed(scheduler, sge_texts.SCHEDULER))

    def _tell(self, option: str, text: str) -> None:
        file = self._folder / option.strip("-")
        file.write_text(text)
        self._qconf(option, str(file))

    def _qconf(self, *words: str) -> str:
        return self._head.output(("qconf", *words))

    def _messages(self, host: Host) -> str:
        spool = self._folder / "spool"
        on_head = host is self._head
        log = spool / ("qmaster" if on_head else f"execd/{host.name}") / "messages"
        started = host.folder / ("sge_qmaster.log" if on_head else "sge_execd.log")
        return f"{host.name}:\n{last_lines(log if log.exists() else started)}"

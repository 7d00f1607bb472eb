"""A real Slurm on a rig: munged, slurmctld on the head, a slurmd on each node.

Partitions are ``debug`` (the default), ``short`` (at most a minute), ``spot`` and
``urgent``; jobs of ``spot`` are requeued when a job of ``urgent`` needs their nodes.
Every node reports two GPUs, which are not real. There is no accounting, and so no
``sacct``.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Sequence
from pathlib import Path

from tests.rigs.testbed.commands import RigError, last_lines, wait_until
from tests.rigs.testbed.daemons import Daemon
from tests.rigs.testbed.host import Host
from tests.rigs.testbed.namespaces import Namespaces

CPUS_PER_NODE = 4
GPUS_PER_NODE = 2

_READY_S = 90.0
_CONFIG = "/etc/slurm"

_CONF = """\
ClusterName=rig
SlurmctldHost=head
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=2
MessageTimeout=5
InactiveLimit=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=1 PreemptMode=OFF
PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def binds(rig: Path) -> tuple[tuple[str, str], ...]:
    """Mounts that the rig needs; ``prepare`` makes their sources."""
    return ((str(rig / "slurm" / "etc"), _CONFIG),)


def prepare(rig: Path, nodes: int) -> None:
    """Write every file that the daemons read."""
    folder = rig / "slurm"
    etc = folder / "etc"
    for each in (etc, folder / "state"):
        each.mkdir(parents=True)
    sizes = {"nodes": nodes, "cpus": CPUS_PER_NODE, "gpus": GPUS_PER_NODE}
    (etc / "slurm.conf").write_text(_CONF.format(folder=folder, **sizes))
    (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    for number in range(GPUS_PER_NODE):
        # slurmd requires a device; /dev/null is harmless.
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    gpus = f"{folder}/gpu[0-{GPUS_PER_NODE - 1}]"
    (etc / "gres.conf").write_text(f"Name=gpu File={gpus}\n")
    _prepare_munge(folder / "munge")


def _prepare_munge(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = pwd.getpwnam("munge")
    for each in (folder, key):
        os.chown(each, munge.pw_uid, munge.pw_gid)


class Slurm:
    """The Slurm daemons of a rig."""

    def __init__(self, rig: Path, head: Host, nodes: Sequence[Host]) -> None:
        self._folder = rig / "slurm"
        self._head = head
        self._nodes = tuple(nodes)
        self._munged: Daemon | None = None

    def start(self, ground: Namespaces) -> None:
        """Start the daemons. One munged serves all hosts, which share its socket."""
        self._munged = Daemon(_munged_argv(self._folder), self._folder / "munged.log")
        self._munged.start(ground)
        socket = self._folder / "munge" / "socket"
        self._munged.wait_ready(socket.is_socket, _READY_S)
        self._head.serve(Daemon(("slurmctld", "-D", "-i"), self._log(self._head)))
        for node in self._nodes:
            node.serve(Daemon(("slurmd", "-D", "-N", node.name), self._log(node)))

    def _log(self, host: Host) -> Path:
        return host.folder / "slurm.log"

    def wait_ready(self) -> None:
        """Wait until every node is idle. Raises RigError with a daemon's last lines."""
        wanted = {node.name for node in self._nodes}
        try:
            wait_until(
                lambda: self.idle() >= wanted, "nodes idle", _READY_S, poll_s=0.1
            )
        except RigError as error:
            late = sorted(wanted - self.idle())
            host = next((n for n in self._nodes if late[:1] == [n.name]), self._head)
            logs = {each: last_lines(self._log(each)) for each in (self._head, host)}
            story = "\n".join(f"{each.name}:\n{text}" for each, text in logs.items())
            raise RigError(f"Slurm: not idle: {' '.join(late)}\n{story}") from error

    def idle(self) -> set[str]:
        """Nodes that could take a job now; none while slurmctld does not answer."""
        done = self._head.run(("sinfo", "-h", "-N", "-o", "%N %T", "-p", "debug"))
        rows = (line.split() for line in done.stdout.splitlines())
        return {row[0] for row in rows if row[1:] == ["idle"]}

    def has_saved(self, job: str) -> bool:
        """Whether slurmctld has saved a job of this name.

        If it is killed before, it gives the job's number to the next one, which hosts
        that remember the number refuse.
        """
        saved = self._folder / "state" / "job_state"
        return saved.exists() and job.encode() in saved.read_bytes()

    def stop(self) -> None:
        """Wait for munged, which has ended with the rig."""
        if self._munged is not None:
            self._munged.stop()


def _munged_argv(folder: Path) -> tuple[str, ...]:
    munge = folder / "munge"
    become = ("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "--")
    files = {
        "socket": "socket",
        "key-file": "key",
        "pid-file": "pid",
        "seed-file": "seed",
        "log-file": "log",
    }
    paths = (f"--{option}={munge / name}" for option, name in files.items())
    # --force: munged otherwise refuses a folder that other users can access.
    return (*become, "munged", "--foreground", "--force", *paths)

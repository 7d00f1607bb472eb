"""Several hosts on one machine, with real sshd, Slurm and Grid Engine.

A rig is one process tree with its own network, mount and PID namespaces, in which the
hosts' namespaces are nested. The machine and other rigs cannot see it or clash with
it. When its first process ends, the kernel removes its daemons, bridge, cables and
mounts. A rig knows nothing of tfcluster.

Tests use the fixture ``testbed`` (four nodes with everything) or ``testbed_factory``,
see ``fixtures``. Users log in to ``testbed.login``::

    testbed.login.output(testbed.ssh("node2", "hostname"))
    testbed.login.run(("sbatch", "job.sh"), user="alice", cwd=folder)
    testbed.nodes[0].cable.cut()
    testbed.repair()

To use a rig by hand: ``python -m tests.rigs.testbed up --slurm --sge``, then
``exec login``.
"""

from tests.rigs.testbed.commands import CommandFailed, RigError, Unavailable
from tests.rigs.testbed.host import Host
from tests.rigs.testbed.rig import Options, Testbed

__all__ = ["CommandFailed", "Host", "Options", "RigError", "Testbed", "Unavailable"]

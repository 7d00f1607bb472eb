"""Several hosts on one machine, with real sshd, Slurm and Grid Engine.

A rig is one process tree: its own network, mount and PID namespaces, with the hosts'
nested in them. So nothing of it can be seen from, or clash with, the machine or
another rig, and its end is the end of one process: the kernel takes the daemons,
bridge, cables and mounts with it. It knows nothing of tfcluster.

In a test, take the fixture ``testbed`` (four nodes with everything) or
``testbed_factory``, see ``fixtures``; people work on ``testbed.login``::

    testbed.login.output(testbed.ssh("node2", "hostname"))
    testbed.login.run(("sbatch", "job.sh"), user="alice", cwd=folder)
    testbed.nodes[0].cable.cut()
    testbed.repair()

By hand: ``python -m tests.testbed up --slurm --sge``, then ``exec login``.
"""

from tests.testbed.commands import CommandFailed, RigError, Unavailable
from tests.testbed.host import Host
from tests.testbed.rig import Options, Testbed

__all__ = ["CommandFailed", "Host", "Options", "RigError", "Testbed", "Unavailable"]

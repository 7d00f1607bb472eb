"""Hosts that are listed in cluster.yaml, each reached over SSH.

The agent is sent over the same session that it then serves, so hosts need only Python
and sshd. Importing this package is cheap: paramiko is imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfcluster.plan.model import Allocation, Description
from tfcluster.schedulers.base import Scheduler

if TYPE_CHECKING:
    from tfcluster.schedulers.ssh.starter import SshStarter


_EXAMPLE = """\
backend: ssh
hosts: [node1, node2]            # or "node[1-4]", or {host: node1, slots: 4, gpus: 4}
# ssh: {user: me, identity_file: ~/.ssh/id_ed25519}
# ports: 40000-41000             # if a firewall opens only these
"""


class SshScheduler(Scheduler):
    """Hosts from the ``hosts`` list, in its order."""

    name = launcher = "ssh"
    title = "SSH"
    example = _EXAMPLE
    lists_hosts = True

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        del env  # missing hosts are reported when they are connected to
        return Allocation(hosts=description.hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> SshStarter:
        """Raises HostError if ssh_config cannot be read or used."""
        from tfcluster.schedulers.ssh.starter import ssh_starter

        return ssh_starter(description, env)

    def reaches(self, other: Scheduler) -> bool:
        return not other.here


SCHEDULER = SshScheduler()

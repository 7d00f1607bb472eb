"""Hosts that are listed in cluster.yaml, each reached over SSH.

The agent is sent over the same session that it then serves, so hosts need only Python
and sshd. Importing this package is cheap: paramiko is imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfcluster.plan.description_json import to_plain
from tfcluster.plan.model import (
    Allocation,
    Description,
    Host,
    listed_hosts,
)
from tfcluster.schedulers.base import Remembering, Scheduler
from tfcluster.schedulers.ssh.route import SavedSettings

if TYPE_CHECKING:
    from tfcluster.schedulers.ssh.starter import SshStarter


_EXAMPLE = """\
backend: ssh
hosts: [node1, node2]            # or "node[1-4]", or {host: node1, slots: 4, gpus: 4}
# ssh: {user: me, identity_file: ~/.ssh/id_ed25519}
# ports: 40000-41000             # if a firewall opens only these
"""


class SshScheduler(Scheduler, Remembering):
    """Hosts from the ``hosts`` list, in its order."""

    name = launcher = "ssh"
    title = "SSH"
    example = _EXAMPLE
    lists_hosts = True

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        del env  # missing hosts are reported when they are connected to
        return Allocation(hosts=listed_hosts(description.hosts))

    def starter(self, description: Description, env: Mapping[str, str]) -> SshStarter:
        """Raises HostError if ssh_config cannot be read or used."""
        from tfcluster.schedulers.ssh.starter import ssh_starter

        return ssh_starter(SavedSettings.of(description), env)

    def reaches(self, other: Scheduler) -> bool:
        return not other.here

    def remember(self, description: Description) -> Mapping[str, Any]:
        saved: dict[str, Any] = to_plain(SavedSettings.of(description))
        return saved

    def return_to(
        self, document: Mapping[str, Any], env: Mapping[str, str]
    ) -> tuple[tuple[Host, ...], SshStarter]:
        from tfcluster.schedulers.ssh.starter import ssh_starter

        saved = SavedSettings.from_json(document)
        return listed_hosts(saved.hosts), ssh_starter(saved, env)


SCHEDULER = SshScheduler()

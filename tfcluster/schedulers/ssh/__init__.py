"""Hosts that are listed in cluster.yaml, each reached over SSH.

The agent is sent over the same session that it then serves, so hosts need only Python
and sshd. Importing this package is cheap: paramiko is imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfcluster.base.errors import ContactLostError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.description_json import from_plain, to_plain
from tfcluster.plan.model import (
    Allocation,
    Description,
    Host,
    HostEntry,
    Interpreter,
    Ssh,
    listed_hosts,
)
from tfcluster.schedulers.base import Remembering, Scheduler

if TYPE_CHECKING:
    from tfcluster.schedulers.ssh.starter import SshStarter


_EXAMPLE = """\
backend: ssh
hosts: [node1, node2]            # or "node[1-4]", or {host: node1, slots: 4, gpus: 4}
# ssh: {user: me, identity_file: ~/.ssh/id_ed25519}
# ports: 40000-41000             # if a firewall opens only these
"""


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The part of a Description from which routes are made; a run's record has it."""

    hosts: tuple[HostEntry, ...]
    ssh: Ssh
    python: Interpreter
    timeout_given: bool
    """Whether ``connect_timeout`` was configured, and so takes precedence."""

    @classmethod
    def of(cls, description: Description) -> SavedSettings:
        return cls(
            description.hosts,
            description.ssh,
            description.python,
            "ssh.connect_timeout" in description.origins,
        )

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SavedSettings:
        """From the record. Raises ContactLostError if it is incomplete."""
        try:
            saved: SavedSettings = from_plain(cls, document)
        except (KeyError, TypeError, ValueError) as error:
            raise ContactLostError(
                "the record does not say how to reach the hosts",
                hint="their agents stop everything when their lease ends",
            ) from error
        return saved


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

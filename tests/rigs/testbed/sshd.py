"""The real sshd of a host: its configuration, its host keys, starting and stopping.

Knows nothing of schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rigs.testbed.accounts import make_key
from tests.rigs.testbed.addresses import Station
from tests.rigs.testbed.daemons import PATH, Daemon
from tests.rigs.testbed.namespaces import Where

_PORT = 22
_READY_S = 15.0
_LISTENING = "0A"  # include/net/tcp_states.h
_KEY = "host_key"
_OTHER_KEY = "other_host_key"


class Sshd:
    """One host's sshd. MaxStartups and MaxSessions have sshd's defaults."""

    def __init__(
        self, host: Where, folder: Path, authorized: Path, env: Mapping[str, str]
    ) -> None:
        self._host = host
        self._folder = folder
        self._authorized = authorized
        self._env = {"PATH": PATH, **env}
        self._key = _KEY
        self._options: tuple[str, ...] = ()
        config = ("-f", str(folder / "sshd_config"))
        self._daemon = Daemon(
            ("/usr/sbin/sshd", "-D", "-e", *config), folder / "sshd.log"
        )

    def known_hosts_line(self, station: Station) -> str:
        """Its line for known_hosts, always with its first key."""
        kind, key = (self._folder / f"{_KEY}.pub").read_text().split()[:2]
        names = (station.name, station.full_name, f"{station.name}-v6")
        every = ",".join((*names, station.ipv4, station.ipv6))
        return f"{every} {kind} {key}\n"

    def start(self) -> None:
        if not (self._folder / self._key).exists():
            make_key(self._folder / self._key, "host")
        lines = (*self._options, *self._lines())
        (self._folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self._daemon.start(self._host())

    def wait_ready(self) -> None:
        pid = self._host().pid
        self._daemon.wait_ready(lambda: _listens(pid, _PORT), _READY_S)

    def stop(self) -> None:
        """Accept no new connections; open connections continue."""
        self._daemon.stop()

    def restart(self, options: Sequence[str] = ()) -> None:
        """Start it again, with lines of sshd_config(5) that override the rig's."""
        self._options = tuple(options)
        self.stop()
        self.start()
        self.wait_ready()

    def change_key(self) -> None:
        """Use a host key that clients do not know."""
        self._key = _OTHER_KEY
        self.restart(self._options)

    def repair(self) -> None:
        """Undo all of these changes."""
        if self._options or self._key != _KEY or not self._daemon.alive:
            self._key = _KEY
            self.restart()

    def _lines(self) -> tuple[str, ...]:
        env = " ".join(f"{name}={value}" for name, value in self._env.items())
        return (
            f"HostKey {self._folder / self._key}",
            f"AuthorizedKeysFile {self._authorized}/%u",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "PidFile none",
            f"SetEnv {env}",
            "Subsystem sftp internal-sftp",
        )


def _listens(pid: int, port: int) -> bool:
    """Whether a process listens on this port in the network namespace of ``pid``."""
    rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    columns = (row.split() for row in rows)
    return any(c[1].endswith(f":{port:04X}") and c[3] == _LISTENING for c in columns)


def ssh_config(known_hosts: Path) -> str:
    """The text for ``ssh -F`` in tests: never prompts, trusts only the rig's hosts."""
    return (
        "Host *\n"
        "  IdentityFile ~/.ssh/id_ed25519\n"
        "  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known_hosts}\n"
        "  GlobalKnownHostsFile none\n"
        "  StrictHostKeyChecking yes\n"
        "  BatchMode yes\n"
        "  ConnectTimeout 5\n"
    )


def system_ssh_config(known_hosts: Path) -> str:
    """The text of /etc/ssh/ssh_config, with only what a site would set."""
    return f"Host *\n  GlobalKnownHostsFile {known_hosts}\n"

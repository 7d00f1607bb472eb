"""A real sshd on loopback, with its own keys, known_hosts and home."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.machine import title
from tests.kit.waiting import eventually

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
USER = pwd.getpwuid(os.getuid()).pw_name
DEADLINE_S = 30.0


def keygen(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key pair; returns the path of the private key."""
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """An sshd to which ``home`` is the user's home."""

    folder: Path
    authorized: Path
    """The file of public keys that may log in."""
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    """Words put before the daemon's command."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def host_key(self) -> Path:
        return self.folder / "host_key"

    @property
    def known_line(self) -> str:
        """The server's line for known_hosts."""
        key = Path(f"{self.host_key}.pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {key[0]} {key[1]}\n"

    def start(self) -> Server:
        assert SSHD is not None
        self.home.mkdir(parents=True, exist_ok=True)
        if not self.host_key.exists():
            keygen(self.host_key)
        config = self.folder / "sshd_config"
        lines = (
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.authorized}",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "StrictModes no",
            "UsePAM no",
            "PidFile none",
            *self.options,
            f"SetEnv HOME={self.home} XDG_CACHE_HOME={self.home}/cache",
        )
        config.write_text("\n".join(lines) + "\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        with (self.folder / "sshd.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*self.prefix, SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._answers, self.log, DEADLINE_S)
        return self

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def log(self) -> str:
        return (self.folder / "sshd.log").read_text(errors="replace")

    def sessions(self) -> list[int]:
        """The processes that serve connections."""
        return self.descendants("sshd")

    def descendants(self, *titles: str) -> list[int]:
        """The processes below the daemon whose command lines begin so."""
        import psutil

        assert self.process is not None
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [each.pid for each in below if title(each.pid).startswith(titles)]

    def cut(self) -> None:
        """Kill the processes that serve connections, as a fault of the host would."""
        for pid in self.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(DEADLINE_S)
            self.process = None

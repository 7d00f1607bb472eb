"""Fixtures: a user with a home and keys, and sshds on loopback as the user's hosts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.machine import carrying
from tests.kit.waiting import eventually
from tests.schedulers.ssh.server import SSHD, USER, Server, keygen


class Site:
    """A home with ``.ssh``, a state folder, and hosts ``one``, ``two``, ..."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh = folder / "home" / ".ssh"
        self.ssh.mkdir(parents=True)
        self.key = keygen(self.ssh / "id_ed25519")
        self.authorized = folder / "authorized"
        self.authorized.write_bytes(Path(f"{self.key}.pub").read_bytes())
        self.servers: dict[str, Server] = {}
        self.cluster = Cluster(
            folder, {"HOME": str(folder / "home"), "SSH_AUTH_SOCK": ""}
        )

    def host(
        self,
        name: str,
        *options: str,
        extra: Sequence[str] = (),
        prefix: tuple[str, ...] = (),
    ) -> Server:
        """Start an sshd that the user knows as ``name``.

        ``options`` are options of sshd, ``extra`` lines of the user's ssh_config for
        this host, and ``prefix`` is put before sshd's command.
        """
        folder = self.folder / name
        folder.mkdir()
        server = Server(folder, self.authorized, options, prefix).start()
        self.servers[name] = server
        lines = (f"Host {name}", "HostName 127.0.0.1", f"Port {server.port}", *extra)
        self.configure(*lines)
        with (self.ssh / "known_hosts").open("a") as known:
            known.write(server.known_line)
        return server

    def configure(self, *lines: str) -> None:
        with (self.ssh / "config").open("a") as config:
            config.write("\n".join(lines) + "\n")

    def forget(self) -> None:
        """Forget all known host keys."""
        (self.ssh / "known_hosts").write_text("")

    def launch(
        self, script: str, hosts: str = "one", *options: str, count: int = 1
    ) -> Running:
        """Launch ``count`` workers that run a shell script on ``hosts``."""
        given = ("-n", str(count), "--hosts", hosts, "--set", "backend=ssh")
        plain = ("--set", "runtime.strategy=none")
        return self.cluster.start(*given, *plain, *options, "--", "bash", "-c", script)

    def end(self) -> None:
        self.cluster.end()
        for server in self.servers.values():
            server.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if SSHD is None:
        pytest.skip("sshd is not installed (openssh-server)")
    site = Site(tmp_path)
    yield site
    runs = site.cluster.run_ids()
    left = [pid for run in runs for pid in carrying(f"TFCLUSTER_RUN={run}")]
    try:
        eventually(
            lambda: not any(carrying(f"TFCLUSTER_RUN={run}") for run in runs),
            lambda: f"left running: {left}",
            20.0,
        )
    finally:
        site.end()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ssh_agent(site: Site) -> Iterator[Site]:
    """The site with a running ssh-agent that holds no keys yet."""
    socket = site.folder / "agent.sock"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL
    )
    eventually(socket.exists, lambda: "no ssh-agent", 10.0)
    site.cluster.environ["SSH_AUTH_SOCK"] = str(socket)
    yield site
    process.terminate()
    process.wait()


__all__ = ["USER", "Site"]

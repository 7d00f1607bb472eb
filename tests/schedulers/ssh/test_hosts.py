"""Launches on real sshds: successful ones, and the messages of failed ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.cluster import Running
from tests.kit.machine import cmdline, is_stopped, pids
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually
from tests.schedulers.ssh.conftest import USER, Site
from tests.schedulers.ssh.server import Server, free_port, keygen


def _failed(run: Running, code: int) -> str:
    """The messages of a run that could not be started."""
    assert run.end() == code, run.err
    return run.err


# --- what works -------------------------------------------------------------------


def test_two_hosts_run_a_task_each(site: Site) -> None:
    site.host("one")
    site.host("two")
    run = site.launch("echo on $SSH_CONNECTION", "one,two", count=2)
    assert run.end() == 0, run.err
    for name, task in (("one", "worker:0"), ("two", "worker:1")):
        assert run.text(task).split()[-1] == str(site.servers[name].port)
    assert [host["host"] for host in run.plan()["hosts"]] == ["one", "two"]


def test_one_name_on_two_ports_is_two_hosts(site: Site) -> None:
    ports = [site.host(name).port for name in ("one", "two")]
    path = site.cluster.file(
        "backend: ssh\ncommand: [bash, -c, 'echo $SSH_CONNECTION']\n"
        "tasks: {worker: 2}\nruntime: {strategy: none}\n"
        f"hosts: [{{host: 127.0.0.1, port: {ports[0]}}},"
        f" {{host: 127.0.0.1, port: {ports[1]}}}]\n"
    )
    run = site.cluster.start(path)
    assert run.end() == 0, run.err
    said = [run.text(f"worker:{index}").split()[-1] for index in (0, 1)]
    assert said == [str(port) for port in ports]


def test_a_machine_under_two_names_is_reported_and_counts_as_one(site: Site) -> None:
    site.host("one")
    site.host("two")
    script = "echo $TFCLUSTER_LOCAL_RANK of $TFCLUSTER_LOCAL_SIZE"
    run = site.launch(script, "one,two", count=2)
    assert run.end() == 0, run.err
    assert [run.text(f"worker:{index}") for index in (0, 1)] == ["0 of 2\n", "1 of 2\n"]
    assert run.err.count("warning: one and two are the same machine") == 1
    assert "{host: one, slots: N}" in run.err


def test_words_in_bashrc_are_passed_over(site: Site) -> None:
    server = site.host("one")
    (server.home / ".bashrc").write_text("echo welcome; echo to one >&2\n")
    run = site.launch("echo fine")
    assert run.end() == 0, run.err
    assert "fine" in run.text("worker:0")


def test_a_jump_over_two_hosts(site: Site) -> None:
    site.host("gate")
    site.host("inner", extra=("ProxyJump gate",))
    site.host("one", extra=("ProxyJump inner",))
    run = site.launch("echo from $SSH_CONNECTION")
    assert run.end() == 0, run.err
    for name in ("gate", "inner"):
        assert "Accepted publickey" in site.servers[name].log()


def test_hosts_behind_one_gate_share_its_connection(site: Site) -> None:
    gate = site.host("gate")
    site.host("one", extra=("ProxyJump gate",))
    site.host("two", extra=("ProxyJump gate",))
    run = site.launch("true", "one,two", count=2)
    assert run.end() == 0, run.err
    assert gate.log().count("Accepted publickey") == 1


def test_a_proxy_command(site: Site) -> None:
    relay = (
        "import socket,sys,threading,os;"
        "s=socket.create_connection(sys.argv[1:3]);"
        "threading.Thread(target=lambda:[os.write(1,d)"
        " for d in iter(lambda:s.recv(65536),bytes())],daemon=True).start();"
        "[s.sendall(d) for d in iter(lambda:os.read(0,65536),bytes())]"
    )
    program = site.folder / "relay.py"
    program.write_text(relay)
    command = f"ProxyCommand {sys.executable} {program} %h %p"
    site.host("one", extra=(command,))
    run = site.launch("echo fine")
    assert run.end() == 0, run.err


def test_a_key_that_the_agent_holds(ssh_agent: Site) -> None:
    site = ssh_agent
    locked = keygen(site.ssh / "locked", passphrase="secret")
    site.authorized.write_bytes(Path(f"{locked}.pub").read_bytes())
    site.host("one", extra=(f"IdentityFile {locked}",))
    ask = site.folder / "ask"
    ask.write_text("#!/bin/sh\necho secret\n")
    ask.chmod(0o700)
    subprocess.run(
        ["ssh-add", "-q", str(locked)],
        env={
            **site.cluster.environ,
            "SSH_ASKPASS": str(ask),
            "SSH_ASKPASS_REQUIRE": "force",
        },
        stdin=subprocess.DEVNULL,
        check=True,
    )
    run = site.launch("true")
    assert run.end() == 0, run.err


def test_a_certificate(site: Site) -> None:
    authority = keygen(site.folder / "authority")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "id", "-n", USER]
    subprocess.run([*sign, f"{site.key}.pub"], check=True)
    site.authorized.write_text("")
    site.host("one", f"TrustedUserCAKeys {authority}.pub")
    run = site.launch("true")
    assert run.end() == 0, run.err
    assert "ED25519-CERT" in site.servers["one"].log()


def test_only_listed_keys_of_the_agent(ssh_agent: Site) -> None:
    """sshd closes the connection after a wrong key: the right key must come first."""
    site = ssh_agent
    for number in range(3):
        other = keygen(site.folder / f"other-{number}")
        subprocess.run(
            ["ssh-add", "-q", str(other)], env=site.cluster.environ, check=True
        )
    site.host(
        "one",
        "MaxAuthTries 1",
        extra=("IdentitiesOnly yes", f"IdentityFile {site.key}"),
    )
    run = site.launch("true")
    assert run.end() == 0, run.err


def test_nothing_secret_is_in_an_argument(site: Site) -> None:
    canary = "canary-5e2f"
    site.cluster.environ["API_TOKEN"] = canary
    site.host("one")
    path = site.cluster.file(
        "backend: ssh\nhosts: [one]\ntasks: {worker: 1}\n"
        "runtime: {strategy: none}\nenv: {PLAIN: plain-canary}\n"
        "secrets: {API_TOKEN: {env: API_TOKEN}}\n"
        "command: [bash, -c, 'echo up; sleep 60']\n"
    )
    run = site.cluster.start(path).up()
    assert not any("canary" in word for pid in pids() for word in cmdline(pid))
    recorded = (run.folder / "plan.json").read_text()
    assert canary not in recorded
    assert canary not in "".join(server.log() for server in site.servers.values())
    assert site.cluster.command("stop", run.run).returncode == 0
    run.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of one's own needs root")
def test_a_host_without_our_files_keeps_its_logs_and_we_a_copy(site: Site) -> None:
    state = site.cluster.state
    state.mkdir(mode=0o700)
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    site.host("one", prefix=("unshare", "--mount", "sh", "-c", mount, str(state)))
    site.host("two")
    run = site.launch("echo said by $TFCLUSTER_TASK", "one,two", count=2)
    assert run.end() == 0, run.err
    assert "logs are on one under " in run.err
    assert run.text("worker:0") == "said by worker:0\n"
    assert run.text("worker:1") == "said by worker:1\n"
    assert run.log("worker:0").stat().st_mode & 0o777 == 0o600
    shown = site.cluster.command("logs", run.run, "worker:0")
    assert "said by worker:0" in shown.stdout


# --- what does not ----------------------------------------------------------------


def test_an_unknown_host_key(site: Site) -> None:
    server = site.host("one")
    site.forget()
    said = _failed(site.launch("true"), 3)
    assert "its host key is unknown: ED25519 SHA256:" in said
    assert f"ssh-keyscan -p {server.port} -t ed25519 127.0.0.1 >>" in said
    assert "Accepted" not in server.log()
    assert (site.ssh / "known_hosts").read_text() == ""


def test_a_changed_host_key(site: Site) -> None:
    server = site.host("one")
    other = Path(f"{keygen(site.folder / 'other')}.pub").read_text().split()[1]
    name = server.known_line.split()[0]
    (site.ssh / "known_hosts").write_text(f"{name} ssh-ed25519 {other}\n")
    said = _failed(site.launch("true"), 3)
    assert "POSSIBLE ATTACK" in said
    assert "known_hosts:1" in said
    assert "Accepted" not in server.log()


def test_a_revoked_host_key(site: Site) -> None:
    server = site.host("one")
    with (site.ssh / "known_hosts").open("a") as known:
        known.write(f"@revoked {server.known_line}")
    assert "revoked" in _failed(site.launch("true"), 3)


def test_a_host_key_is_found_by_its_kind(site: Site) -> None:
    """The host has several keys, and the user knows only one of them."""
    rsa = keygen(site.folder / "rsa", kind="rsa")
    server = site.host("one", f"HostKey {rsa}")
    public = Path(f"{rsa}.pub").read_text().split()
    name = server.known_line.split()[0]
    (site.ssh / "known_hosts").write_text(f"{name} {public[0]} {public[1]}\n")
    run = site.launch("true")
    assert run.end() == 0, run.err


def test_nobody_lets_us_in(site: Site) -> None:
    site.host("one")
    site.authorized.write_text("")
    said = _failed(site.launch("true"), 3)
    assert f"Permission denied (publickey) as user {USER}" in said
    assert f"tried {site.key}" in said


def test_a_key_that_needs_a_passphrase(site: Site) -> None:
    locked = keygen(site.ssh / "locked", passphrase="secret")
    site.host("one", extra=(f"IdentityFile {locked}",))
    said = _failed(site.launch("true"), 3)
    assert f"{locked} needs a passphrase" in said
    assert f"ssh-add {locked}" in said


def test_all_hosts_that_fail_are_reported(site: Site) -> None:
    site.configure("Host gone", "HostName 127.0.0.1", f"Port {free_port()}")
    site.configure("Host lost", "HostName no-such-name.invalid")
    site.host("one")
    run = site.launch("true", "one,gone,lost", count=3)
    said = _failed(run, 3)
    assert "refused the connection" in said
    assert "no-such-name.invalid does not resolve" in said
    # The trace shows that they did not wait for their turn until they failed.
    stages = {(event["host"], event["stage"]) for event in run.found("stage")}
    assert {("gone", "connect"), ("lost", "connect")} <= stages


@contextmanager
def _listener(answer: bytes, *, close: bool) -> Iterator[tuple[int, list[int]]]:
    """A listener that is not an sshd, and a list that grows with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen: list[int] = []
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                seen.append(len(seen))
                link.sendall(answer)
                if close:
                    link.close()
                else:
                    kept.append(link)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], seen
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for link in kept:
            link.close()


@pytest.mark.parametrize(
    ("answer", "stage"), [(b"", "tcp"), (b"SSH-2.0-stall\r\n", "banner")]
)
def test_a_host_that_falls_silent(site: Site, answer: bytes, stage: str) -> None:
    with _listener(answer, close=False) as (port, _):
        site.configure(
            "Host one", "HostName 127.0.0.1", f"Port {port}", "ConnectTimeout 1"
        )
        said = _failed(site.launch("true"), 3)
    assert f"sent nothing for 1 s (stuck after: {stage})" in said


def test_nobody_waits_for_a_silent_host_when_interrupted(site: Site) -> None:
    with _listener(b"", close=False) as (port, seen):
        site.configure(
            "Host one", "HostName 127.0.0.1", f"Port {port}", "ConnectTimeout 60"
        )
        run = site.launch("true")
        eventually(lambda: bool(seen), lambda: run.err, 10.0)
        run.signal(signal.SIGINT)
        code, seconds = run.end_timed()
    assert code == 130
    assert seconds < allow_s(5)


@pytest.mark.slow
def test_a_host_that_turns_us_away_is_asked_again(site: Site) -> None:
    with _listener(b"", close=True) as (port, seen):
        site.configure("Host one", "HostName 127.0.0.1", f"Port {port}")
        said = _failed(site.launch("true"), 3)
    assert len(seen) == 5
    assert "MaxStartups" in said


def test_many_at_once_get_through_to_an_sshd_that_turns_some_away(site: Site) -> None:
    server = site.host("one", "MaxStartups 2")
    names = [f"h{number}" for number in range(6)]
    address = ("HostName 127.0.0.1", f"Port {server.port}", "HostKeyAlias one")
    site.configure(f"Host {' '.join(names)}", *address)
    key = server.known_line.split(" ", 1)[1]
    with (site.ssh / "known_hosts").open("a") as known:
        known.write(f"one {key}")
    run = site.launch("true", ",".join(names), count=6)
    assert run.end() == 0, run.err
    assert "MaxStartups" in server.log(), "some were turned away"


def test_no_python_there(site: Site) -> None:
    site.host("one")
    run = site.launch("true", "one", "--set", "python=/opt/no/python")
    said = _failed(run, 4)
    assert "/opt/no/python does not exist: " in said
    assert ") (" not in said
    assert "(set 'python' to the interpreter that the hosts have)" in said


def test_python_is_too_old(site: Site) -> None:
    site.host("one")
    old = site.folder / "python"
    old.write_text(
        f"#!{sys.executable} -IS\n"
        "import sys; sys.version_info = (3, 9, 2, 'final', 0)\n"
        "exec(sys.argv[-1])\n"
    )
    old.chmod(0o700)
    run = site.launch("true", "one", "--set", f"python={old}")
    assert "tfcluster needs Python 3.10, this is 3.9" in _failed(run, 4)


def test_only_noise_comes(site: Site) -> None:
    site.host("one", "ForceCommand echo this account is closed")
    said = _failed(site.launch("true"), 4)
    assert "no hello from the agent; it said: this account is closed" in said


def test_a_cut_connection_ends_the_run(site: Site) -> None:
    server = site.host("one")
    site.host("two")
    run = site.launch("echo up; sleep 60", "one,two", count=2).up(count=2)
    server.cut()
    code, seconds = run.end_timed()
    assert code == 5
    assert "contact lost: the SSH connection was lost" in run.err
    assert seconds < allow_s(15)


def test_a_killed_launcher_leaves_nothing(site: Site) -> None:
    site.host("one")
    run = site.launch("echo up; sleep 60").up()
    run.process.kill()
    run.process.wait()
    # The fixture waits until nothing of the run is left.


def test_a_stopped_task_is_gone(site: Site) -> None:
    site.host("one")
    run = site.launch("echo up $$; sleep 60").up()
    pid = int(run.text("worker:0").split()[-1])
    assert site.cluster.command("stop", run.run).returncode == 0
    run.end()
    eventually(lambda: not _alive(pid), lambda: f"{pid} lives", 20.0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_stop_sweeps_the_hosts_of_a_lost_run(site: Site) -> None:
    """Launcher, agent and guard are killed at once: no process is left to clean up."""
    server = site.host("one")
    run = site.launch("echo up $$; sleep 60").up()
    pid = int(run.text("worker:0").split()[-1])
    agents = _agents(server)
    # Each would clean up if it saw another die, so first all of them stand still.
    for process in (run.process.pid, *reversed(agents)):
        os.kill(process, signal.SIGSTOP)
        _wait_until_stopped(process)
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    run.process.kill()
    run.process.wait()
    assert _alive(pid)
    done = site.cluster.command("stop", run.run)
    assert done.returncode == 0, done.stderr
    assert "one: " in done.stderr
    assert "leftover processes ended" in done.stderr
    eventually(lambda: not _alive(pid), lambda: f"{pid} lives", 20.0)


def test_stop_says_which_hosts_it_cannot_sweep(site: Site) -> None:
    server = site.host("one")
    run = site.launch("echo up; sleep 60").up()
    run.process.kill()
    run.process.wait()
    server.stop()
    done = site.cluster.command("stop", run.run)
    assert done.returncode == 5
    assert "refused the connection" in done.stderr
    assert "one could not be swept" in done.stderr


def _wait_until_stopped(pid: int) -> None:
    eventually(lambda: is_stopped(pid), lambda: f"{pid} runs", 20.0)


def _agents(server: Server) -> list[int]:
    """The pids of the guard and of the agent that it forked, in this order."""
    return server.descendants("tfcluster: guard", "tfcluster: agent")

"""The rig of hosts provides what tests need, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.time_limits import allow_s
from tests.rigs.testbed import (
    Options,
    RigError,
    Testbed,
    Unavailable,
    layout,
    namespaces,
    packages,
    record,
)
from tests.rigs.testbed.addresses import hosts_file, stations
from tests.rigs.testbed.commands import check, run, wait_until
from tests.rigs.testbed.fixtures import Factory
from tests.rigs.testbed.namespaces import Mask
from tests.rigs.testbed.sge_texts import changed
from tests.rigs.testbed.sshd import Sshd

_WAIT_S = 40.0


def test_nodes_are_numbered_from_one_and_found_by_both_names() -> None:
    text = hosts_file(stations(2, with_head=True))
    assert "198.18.0.11 node1.cluster.test node1\n" in text
    assert "198.18.0.3 head.cluster.test head\n" in text
    assert "node3" not in text


@pytest.mark.parametrize("count", [0, 1001])
def test_a_rig_has_as_many_nodes_as_there_are_addresses(count: int) -> None:
    with pytest.raises(ValueError, match=f"not {count}"):
        stations(count, with_head=False)


def test_what_hosts_must_see_shows_through_what_is_their_own() -> None:
    shared = Path("/tmp/base")
    setup = layout.host_setup(
        "node1",
        hosts_file=Path("/run/rig/hosts"),
        keep=(Path("/run/rig"), shared, Path("/opt/python")),
        private_homes=(),
    )
    assert Mask("/tmp", (str(shared),), "1777") in setup.masks
    assert Mask("/run", ("/run/rig",), "0755") in setup.masks


def test_a_setting_that_grid_engine_does_not_have_is_an_error() -> None:
    assert changed("# Version\na 1\nb x y\n", {"a": "2"}) == "a 2\nb x y\n"
    with pytest.raises(KeyError, match="min_uidd"):
        changed("min_uid 1\n", {"min_uidd": "0"})


# Hosts.


def test_each_host_has_its_own_name_and_address(testbed: Testbed) -> None:
    for node in testbed.nodes:
        assert node.output(("hostname",)) == f"{node.name}\n"
        assert f" {node.address}/16 " in node.output(("ip", "-4", "addr"))


def test_each_host_has_memory_and_temporary_files_of_its_own(
    testbed: Testbed, tmp_path: Path
) -> None:
    one, two = testbed.nodes[:2]
    for folder in ("/dev/shm", "/tmp", "/var/tmp"):
        mine = f"{folder}/{testbed.name}"
        one.output(("touch", mine))
        assert two.run(("test", "-e", mine)).returncode == 1
        assert not Path(mine).exists()
    one.output(("touch", str(tmp_path / "ours")))
    assert two.run(("test", "-e", str(tmp_path / "ours"))).returncode == 0


def test_no_way_leads_out_of_the_rig(testbed: Testbed) -> None:
    routes = testbed.login.output(("ip", "route"))
    assert routes.split()[0] == "198.18.0.0/16"
    assert len(routes.splitlines()) == 1


def test_hosts_reach_each_other_by_ipv6_too(testbed: Testbed) -> None:
    ssh = testbed.ssh("node2-v6", "hostname")
    assert testbed.login.output(ssh) == "node2\n"


@pytest.mark.parametrize("user", ["root", "alice", "bob"])
def test_everybody_logs_in_by_ssh_as_themselves(testbed: Testbed, user: str) -> None:
    ssh = testbed.ssh("node3", "id -un; pwd; hostname")
    said = testbed.login.output(ssh, user=user).split()
    assert said == [user, str(testbed.accounts[user].home), "node3"]


def test_ssh_carries_standard_input_and_the_exit_code(testbed: Testbed) -> None:
    done = testbed.login.run(testbed.ssh("node1", "cat; exit 7"), stdin="a\nb\n")
    assert (done.returncode, done.stdout) == (7, "a\nb\n")


def test_nobody_gets_into_the_account_of_another(testbed: Testbed) -> None:
    ssh = testbed.ssh("bob@node1", "id")
    done = testbed.login.run(ssh, user="alice")
    assert done.returncode == 255
    assert "Permission denied" in done.stderr
    done = testbed.login.run(("ls", str(testbed.accounts["bob"].home)), user="alice")
    assert "Permission denied" in done.stderr


def test_everybody_can_use_this_interpreter(testbed: Testbed) -> None:
    code = "import tfcluster.plan.model, psutil"
    env = {"PYTHONPATH": str(layout.REPOSITORY)}
    testbed.nodes[0].output((sys.executable, "-c", code), user="bob", env=env)


def test_nothing_of_this_environment_gets_inside(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAK", "1")
    assert "LEAK" not in testbed.login.output(("env",))


def test_processes_are_found_by_what_they_carry(testbed: Testbed) -> None:
    one, two = testbed.nodes[:2]
    ssh = testbed.ssh("node1", "MARK=a sleep 100")
    with testbed.login.popen(ssh) as client:
        (found,) = wait_until(lambda: one.processes("MARK=a"), "sleep", _WAIT_S)
        assert found.argv == ("sleep", "100")
        assert one.processes("MARK") == [found]
        assert one.processes("MARK=b") == two.processes("MARK") == []
        os.kill(found.pid, signal.SIGKILL)
        assert client.wait(_WAIT_S) != 0
    assert one.processes("MARK") == []


def test_a_signal_reaches_the_program_and_not_the_way_in(testbed: Testbed) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo up; while :; do sleep 0.05; done"
    with testbed.login.popen(("bash", "-c", script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.stdout.read() == b"caught\n"
        assert process.wait(_WAIT_S) == 5


def test_a_program_that_takes_too_long_is_ended(testbed: Testbed) -> None:
    began = time.monotonic()
    with pytest.raises(RigError, match=r"not done after 0\.3 s"):
        testbed.login.run(("env", "MARK=slow", "sleep", "100"), timeout_s=0.3)
    assert time.monotonic() - began < allow_s(10)
    assert testbed.login.processes("MARK=slow") == []


# Rigs.


def _left_of(path: Path) -> list[str]:
    """Processes and mounts of this machine that mention a rig's folder."""
    mounts = [
        m for m in Path("/proc/mounts").read_text().splitlines() if str(path) in m
    ]
    listed = run(("ps", "-eo", "stat=,args=")).stdout.splitlines()
    processes = [p for p in listed if str(path) in p and not p.startswith("Z")]
    return [*mounts, *processes, *([str(path)] if path.exists() else [])]


def test_two_rigs_do_not_see_each_other_and_leave_nothing(
    testbed_factory: Factory,
) -> None:
    with testbed_factory(Options(nodes=1)) as one:
        two = testbed_factory(Options(nodes=1))
        assert one.name != two.name
        assert one.nodes[0].address == two.nodes[0].address
        links = check(("ip", "-brief", "link"))
        assert not any(name in links for name in ("bridge", "login", "node1"))
        two.nodes[0].output(("touch", "only-here"))
        assert one.nodes[0].run(("test", "-e", "only-here")).returncode == 1
        intruder = one.ssh("node1", "true", config=two.ssh_config)
        assert one.login.run(intruder).returncode == 255
        two.down()
        assert one.login.output(one.ssh("node1", "hostname")) == "node1\n"
        assert _left_of(two.path) == []
    assert _left_of(one.path) == []


def test_a_rig_goes_down_also_when_all_stand_still(testbed_factory: Factory) -> None:
    with testbed_factory(Options(nodes=2)) as rig:
        process = rig.nodes[0].popen(("sleep", "100"), stdout=None)
        for host in rig.hosts:
            host.freeze()
    assert process.wait(_WAIT_S) != 0
    assert _left_of(rig.path) == []


def test_a_host_with_a_home_of_its_own_shares_none(testbed_factory: Factory) -> None:
    options = Options(nodes=2, private_home=frozenset({"node2"}))
    with testbed_factory(options) as rig:
        rig.login.output(("touch", "note"), user="alice")
        look = "ls -a; touch mine"
        assert "note" in rig.login.output(rig.ssh("node1", look), user="alice")
        assert rig.login.output(rig.ssh("node2", look), user="alice") == ".\n..\n"
        assert "mine" in rig.nodes[1].output(("ls",), user="alice")


def test_a_private_home_is_one_of_a_host_that_there_is() -> None:
    with pytest.raises(RigError, match="no such host: node9"):
        Options(nodes=2, private_home=frozenset({"node9"}))


_CRASH = """
import os, sys
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.host import Host

power_on = Host.power_on

def crash(host):
    power_on(host)
    if host.name == "node2":
        if sys.argv[2] == "still":
            host.freeze()
        print(host.namespaces.pid, flush=True)
        os.kill(os.getpid(), 9)

Host.power_on = crash
Testbed.up(Options(nodes=3), name=sys.argv[1])
"""


@pytest.mark.parametrize("how", ["running", "still"])
def test_a_crash_in_the_middle_leaves_nothing(
    testbed_factory: Factory, how: str
) -> None:
    testbed_factory(Options(nodes=1)).down()  # skips if rigs are not possible
    name = f"crash-{how}-{os.getpid()}"
    argv = (sys.executable, "-c", _CRASH, name, how)
    pid = run(("env", f"PYTHONPATH={layout.REPOSITORY}", *argv)).stdout.strip()
    path = record.FOLDER / name
    assert path.exists()

    def swept() -> bool:
        record.sweep()
        return _left_of(path) == []

    wait_until(swept, "nothing left", _WAIT_S)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_a_daemon_that_does_not_start_says_why(
    testbed_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _own_rigs()
    monkeypatch.setattr(Sshd, "_lines", lambda _: ("Nonsense yes",))
    with pytest.raises(RigError, match="Bad configuration option: Nonsense"):
        testbed_factory(Options(nodes=1))
    assert _own_rigs() == before


def _own_rigs() -> list[str]:
    """The rigs of this process; other test processes start rigs at the same time."""
    return [name for name in record.names() if name.startswith(f"{os.getpid()}-")]


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    python = ("env", "-C", str(layout.REPOSITORY), sys.executable)
    return run((*python, "-m", "tests.rigs.testbed", *words), timeout_s=60)


def test_the_commands(testbed_factory: Factory) -> None:
    testbed_factory(Options(nodes=1)).down()  # skips if rigs are not possible
    name = f"--name=commands-{os.getpid()}"
    assert _command(name, "up", "-n", "2").stdout == "login node1 node2\n"
    try:
        assert _command(name, "up").stderr.startswith("testbed: a rig named commands-")
        config = str(record.FOLDER / name[7:] / "ssh_config")
        ssh = ("ssh", "-F", config, "-o", "ConnectTimeout=1", "node2")
        said = _command(name, "exec", "-u", "bob", "login", *ssh, "id -un; hostname")
        assert said.stdout == "bob\nnode2\n"
        assert _command(name, "cut", "node2").returncode == 0
        assert _command(name, "exec", "login", *ssh, "true").returncode == 255
        assert _command(name, "heal", "node2").returncode == 0
        wait_until(
            lambda: not _command(name, "exec", "login", *ssh, "true").returncode,
            "healed",
            _WAIT_S,
        )
        assert _command(name, "kill", "node2").returncode == 0
        assert f"{name[7:]} node2 198.18.0.12 off\n" in _command("status").stdout
        assert "no host node7" in _command(name, "cut", "node7").stderr
    finally:
        assert _command(name, "down").returncode == 0
    assert _left_of(record.FOLDER / name[7:]) == []
    assert "no rig at" in _command(name, "down").stderr


def test_without_root_there_is_one_line_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match=r"^a rig of namespaces needs root$"):
        Testbed.up(Options(nodes=1))


def test_without_apt_there_is_one_line_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"^no apt-get to install iproute2 [-a-z ]+$"):
        packages.install(("ssh",), tmp_path / "lock")


def test_a_rig_installs_nothing_but_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "PATH", str(tmp_path))
    monkeypatch.setattr(namespaces, "check_possible", lambda: None)
    with pytest.raises(Unavailable, match=r"^not installed: .*rigs\.testbed install"):
        Testbed.up(Options(nodes=1))


def test_without_namespaces_there_is_one_line_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text(
        "#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n"
    )
    refusing.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        Unavailable, match=r"^no namespaces .*: Operation not permitted$"
    ):
        Testbed.up(Options(nodes=1))

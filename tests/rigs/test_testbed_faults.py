"""Every fault that the rig can inject really happens and can be repaired."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.testbed import Host, RigError, Testbed, Unavailable, layout

_WAIT_S = 40.0


@contextmanager
def _conversation(rig: Testbed, node: Host) -> Iterator[subprocess.Popen[bytes]]:
    """An ssh connection that echoes lines, and has echoed one already."""
    ssh = rig.ssh(node.name, "MARK=echo exec cat")
    with rig.login.popen(ssh, stdin=subprocess.PIPE) as client:
        try:
            assert _answers(client, _WAIT_S)
            yield client
        finally:
            client.kill()


def _answers(client: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether a line is echoed; end of file does not count."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"again\n")
    client.stdin.flush()
    ready = select.select([client.stdout], [], [], timeout_s)[0]
    return bool(ready) and client.stdout.readline() == b"again\n"


def _at_most_a_second(ssh: tuple[str, ...]) -> tuple[str, ...]:
    return (ssh[0], "-o", "ConnectTimeout=1", *ssh[1:])


def test_a_cut_cable_is_silent_and_heals(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node = rig.nodes[0]
    with _conversation(rig, node) as client:
        node.cable.cut()
        assert not _answers(client, 1.0)
        assert client.poll() is None, "neither FIN nor RST may come"
        assert node.processes("MARK=echo"), "the host itself runs on"
        node.cable.heal()
        assert client.stdout is not None
        assert client.stdout.readline() == b"again\n", "nothing was lost"


def test_a_host_without_power_says_no_more(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node = rig.nodes[0]
    with _conversation(rig, node) as client:
        inside = [process.pid for process in node.processes()]
        assert len(inside) >= 3
        node.power_off()
        assert not any(Path(f"/proc/{pid}").exists() for pid in inside)
        assert not _answers(client, 1.0)
        assert client.poll() is None, "neither FIN nor RST may come"
        with pytest.raises(RigError, match="node1 has no power"):
            node.run(("true",))
    ssh = rig.ssh("node1", "hostname")
    assert rig.login.run(_at_most_a_second(ssh)).returncode == 255
    rig.repair()
    assert rig.login.output(ssh) == "node1\n"
    assert rig.slurm is not None
    assert "node1" in rig.slurm.idle()


def test_a_frozen_host_is_connected_but_does_nothing(
    breakable_testbed: Testbed,
) -> None:
    rig = breakable_testbed
    node = rig.nodes[1]
    with _conversation(rig, node) as client:
        node.freeze()
        assert not _answers(client, 0.5)
        listens = "import socket; socket.create_connection(('node2', 22), 5)"
        rig.login.output((sys.executable, "-c", listens))
        node.thaw()
        assert client.stdout is not None
        assert client.stdout.readline() == b"again\n"


def test_a_frozen_host_can_lose_its_power(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node = rig.nodes[1]
    with node.popen(("sleep", "100")) as process:
        node.freeze()
        node.power_off()
        process.kill()
        assert process.wait(_WAIT_S) != 0


def test_packets_can_be_lost_between_two_hosts_only(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    one, two, three = rig.nodes[:3]
    one.cable.drop_to(two.cable)
    assert one.run(_at_most_a_second(rig.ssh("node2", "true"))).returncode == 255
    assert one.output(rig.ssh("node3", "hostname")) == "node3\n"
    assert three.output(rig.ssh("node2", "hostname")) == "node2\n"
    one.cable.undrop()
    assert one.output(rig.ssh("node2", "hostname")) == "node2\n"


def test_a_slow_cable_takes_its_time(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node, kib = rig.nodes[2], 64
    copy = rig.ssh("node3", f"head -c {kib * 1024} /dev/zero")
    node.cable.limit(500)
    began = time.monotonic()
    assert len(rig.login.output(copy)) == kib * 1024
    # The first 16 KiB of the burst are free.
    assert time.monotonic() - began > (kib - 16) * 8.192 / 500


def _connects(rig: Testbed, port: int) -> str:
    code = (
        "import socket\n"
        f"try: socket.create_connection(('node1', {port}), 1); print('open')\n"
        "except TimeoutError: print('silence')\n"
        "except ConnectionRefusedError: print('refused')\n"
    )
    return rig.login.output((sys.executable, "-c", code)).strip()


def test_a_firewall_drops_or_rejects(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node = rig.nodes[0]
    try:
        node.firewall.drop("20-30")
    except Unavailable as error:
        pytest.skip(str(error))
    assert _connects(rig, 22) == "silence"
    node.firewall.open()
    node.firewall.reject("22")
    assert _connects(rig, 22) == "refused"
    node.firewall.open()
    assert _connects(rig, 22) == "open"


def test_a_changed_host_key_is_refused(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    ssh = rig.ssh("node4", "hostname")
    rig.nodes[3].sshd.change_key()
    done = rig.login.run(ssh)
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
    rig.nodes[3].repair()
    assert rig.login.output(ssh) == "node4\n"


def test_a_stopped_sshd_refuses_newcomers_only(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node = rig.nodes[0]
    with _conversation(rig, node) as client:
        node.sshd.stop()
        assert _connects(rig, 22) == "refused"
        assert _answers(client, _WAIT_S)


def test_an_sshd_can_be_given_other_limits(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    rig.nodes[0].sshd.restart(("MaxSessions 0",))
    assert rig.login.run(rig.ssh("node1", "true")).returncode != 0


def test_a_disk_is_full_on_one_host(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    one, two = rig.nodes[:2]
    folder = rig.accounts["alice"].home / "state"
    one.filesystem.limit(folder, 64 * 1024)
    one.filesystem.fill(folder)
    write = ("dd", "if=/dev/zero", f"of={folder}/log", "bs=8192", "count=1")
    done = one.run(write, user="alice")
    assert "No space left on device" in done.stderr
    two.output(write)
    one.filesystem.drain(folder)
    one.output(write, user="alice")


def test_only_a_disk_of_its_own_is_filled(testbed: Testbed) -> None:
    with pytest.raises(RigError, match="no disk of this host's own"):
        testbed.nodes[0].filesystem.fill(testbed.accounts["bob"].home)


def test_a_folder_can_be_missing_on_one_host(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    one, two = rig.nodes[:2]
    one.filesystem.hide(layout.REPOSITORY / "tfcluster")
    look = ("ls", str(layout.REPOSITORY / "tfcluster"))
    assert one.output(look) == ""
    assert "cli.py" in two.output(look)
    one.repair()
    assert "cli.py" in one.output(look)


def test_python_can_be_missing_on_one_host(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    node, ssh = rig.nodes[0], rig.ssh("node1", "python3 --version")
    node.filesystem.remove_python()
    done = rig.login.run(ssh)
    assert (done.returncode, "not found" in done.stderr) == (127, True)
    assert node.run(("python3", "--version")).returncode == 127
    node.repair()
    assert rig.login.output(ssh).startswith("Python 3")


def test_a_name_can_mean_something_else_on_one_host(breakable_testbed: Testbed) -> None:
    rig = breakable_testbed
    one, two = rig.nodes[:2]
    one.filesystem.write_hosts_file("127.0.0.1 localhost\n127.0.1.1 node1\n")
    ask = ("getent", "ahostsv4", "node1")
    assert one.output(ask).split()[0] == "127.0.1.1"
    assert two.output(ask).split()[0] == "198.18.0.11"

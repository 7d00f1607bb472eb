"""Kept interpreters over SSH: hosts that share their home folder keep their own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.agent.client import eventually, gone
from tests.launch.kept import STANDIN
from tests.schedulers.ssh.test_rig import USER, Site
from tests.testbed import Host, Options, Testbed
from tests.testbed.fixtures import Factory
from tests.testbed.host import Login

COMMAND = (sys.executable, "-m", "tfcluster")
NAMES = ["node1", "node2"]
PROGRAM = """
import os, socket, time
import tensorflow
forked = tensorflow.imported_by != os.getpid()
print("| up", socket.gethostname(), forked, flush=True)
while not os.path.exists("meeting"):
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=2, slurm=True))


@pytest.fixture
def site(rig: Testbed) -> Iterator[Site]:
    account = rig.accounts[USER]
    folder = account.home / "trial"
    folder.mkdir(exist_ok=True)
    os.chown(folder, account.number, account.number)
    site = Site(rig, folder)
    site.command("mkdir", "-p", "packages/tensorflow", "packages/keras")
    for name, version in (("tensorflow", "2.21.0"), ("keras", "3.15.0")):
        file = f"packages/{name}/__init__.py"
        site.write(file, STANDIN.format(version=version))
    site.write("train.py", PROGRAM)
    config = {
        "backend": "ssh",
        "hosts": NAMES,
        "tasks": {"worker": 2},
        "command": "python train.py",
        "env": {"PYTHONPATH": str(folder / "packages")},
        "runtime": {"strategy": "none"},
    }
    site.write("cluster.yaml", json.dumps(config))
    yield site
    command(site, "warm", "--stop")


def command(site: Site, *words: str) -> str:
    code, said = site.command(*COMMAND, *words)
    assert code == 0, said
    return said


def kept(site: Site) -> dict[str, dict[str, Any]]:
    """The kept interpreter of each host."""
    found = json.loads(command(site, "warm", "--list", "--json"))["interpreters"]
    assert len(found) == len({each["host"] for each in found})
    return {each["host"]: each for each in found}


def test_each_host_keeps_one_and_launches_take_them(site: Site) -> None:
    said = command(site, "warm", "cluster.yaml")
    assert said.count("keeps TensorFlow 2.21.0, Keras 3.15.0") == 2
    before = kept(site)
    assert list(before) == NAMES
    (site.folder / "meeting").touch()
    for uses in (1, 2):
        said = command(site, "launch", "cluster.yaml")
        took = "took kept interpreters with TensorFlow 2.21.0, Keras 3.15.0"
        assert f"node[1-2]: {took}" in said
        for name in NAMES:
            assert f"up {name} True" in said
        after = kept(site)
        assert {name: each["pid"] for name, each in after.items()} == {
            name: each["pid"] for name, each in before.items()
        }
        assert {each["uses"] for each in after.values()} == {uses}
    said = command(
        site, "launch", "-v", "cluster.yaml", "--set", "env.OMP_NUM_THREADS=3"
    )
    (site.folder / "meeting").unlink()
    for name in NAMES:
        pid = before[name]["pid"]
        assert f"{name}: the kept interpreter with pid {pid} is not used: " in said
    assert "took" not in said
    said = command(site, "warm", "--stop", "cluster.yaml")
    assert said.count(" ends\n") == 2
    for name in NAMES:
        eventually(partial(_has_none, site.rig.host(name), "kept"), "it ends")
    assert not list((site.folder / "state" / "warm-hosts").iterdir())


def test_nothing_is_left_on_hosts_when_the_launcher_dies(site: Site) -> None:
    command(site, "warm", "cluster.yaml")
    with (site.folder / "said").open("wb") as said:
        run = site.rig.login.popen(
            [*COMMAND, "launch", "cluster.yaml"],
            login=_login(site),
            stdout=said,
        )
    site.up(2)
    (launcher,) = [
        each
        for each in site.rig.login.processes()
        if list(each.argv[1:4]) == ["-m", "tfcluster", "launch"]
    ]
    os.kill(launcher.pid, signal.SIGKILL)
    run.wait(30)
    for name in NAMES:
        host = site.rig.host(name)
        eventually(partial(_has_none, host, "agent"), "the agents end")
        assert not host.processes("TFCLUSTER_RUN")
        (pid,) = _titled(host, "kept")
        assert not gone(pid)
    assert list(kept(site)) == NAMES


def test_inside_a_job_it_ends_with_the_job(site: Site) -> None:
    (site.folder / "meeting").touch()
    tfcluster = " ".join(COMMAND)
    here = "cluster.yaml --set backend=local"
    lines = (
        f"{tfcluster} warm cluster.yaml --set backend=slurm; echo refused: $?",
        f"{tfcluster} warm {here} && {tfcluster} launch {here}; echo launched: $?",
    )
    code, said = site.command(
        "srun", "--quiet", "--ntasks=1", "bash", "-c", "\n".join(lines)
    )
    (site.folder / "meeting").unlink()
    assert code == 0, said
    assert "interpreters cannot be kept on hosts of backend slurm" in said
    assert "refused: 2\n" in said
    assert "took a kept interpreter with TensorFlow 2.21.0" in said
    assert "launched: 0\n" in said
    for name in NAMES:
        eventually(partial(_has_none, site.rig.host(name), "kept"), "it ends")


def _login(site: Site) -> Login:
    return Login(user=USER, cwd=site.folder, env=site.environ)


def _titled(host: Host, title: str) -> list[int]:
    start = f"tfcluster: {title}"
    return [p.pid for p in host.processes() if " ".join(p.argv).startswith(start)]


def _has_none(host: Host, title: str) -> bool:
    return not _titled(host, title)

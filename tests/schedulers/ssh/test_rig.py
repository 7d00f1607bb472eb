"""Launches over SSH on several hosts: files, lost hosts, network and power failures.

The order of the tests matters: a host that was switched off has another hardware
address afterwards, which its neighbours learn only after a while.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.waiting import eventually
from tests.rigs.testbed import Host, Options, Testbed
from tests.rigs.testbed.daemons import InsideProcess
from tests.rigs.testbed.fixtures import Factory
from tests.rigs.testbed.host import Login
from tests.rigs.testbed.layout import REPOSITORY

USER = "alice"
LAUNCH = (sys.executable, "-m", "tfcluster", "launch")
PLAIN = ("--set", "backend=ssh", "--set", "runtime.strategy=none")


class Site:
    """A user's folder on a rig, which all hosts except node4 share."""

    def __init__(self, rig: Testbed, folder: Path) -> None:
        self.rig = rig
        self.folder = folder
        self.environ = {
            "TFCLUSTER_STATE_DIR": str(folder / "state"),
            "PYTHONPATH": str(REPOSITORY),
        }

    @property
    def said(self) -> str:
        """The output of the command that was started last."""
        return (self.folder / "said").read_text()

    def command(self, *argv: str, timeout_s: float = 120.0) -> tuple[int, str]:
        done = self.rig.login.run(
            argv, user=USER, cwd=self.folder, env=self.environ, timeout_s=timeout_s
        )
        return done.returncode, done.stdout + done.stderr

    def write(self, name: str, text: str) -> None:
        path = str(self.folder / name)
        self.rig.login.run(("tee", path), user=USER, stdin=text)

    def start(self, hosts: str, count: int, script: str) -> InsideProcess:
        """Launch ``count`` workers that run a shell script on ``hosts``."""
        where = ("-n", str(count), "--hosts", hosts, "--set", "workdir=/")
        with (self.folder / "said").open("wb") as said:
            return self.rig.login.popen(
                [*LAUNCH, "-v", *where, *PLAIN, "--", "bash", "-c", script],
                login=Login(user=USER, cwd=self.folder, env=self.environ),
                stdout=said,
            )

    def within(self, *options: str, argv: Sequence[str]) -> tuple[int, str]:
        """Run ``argv`` within a Slurm allocation."""
        return self.command("salloc", "--quiet", *options, *argv)

    def up(self, count: int) -> None:
        """Wait until ``count`` tasks have printed that they are up."""
        eventually(lambda: self.said.count("| up") == count, lambda: self.said, 30.0)


def kill_run(host: Host) -> None:
    """Kill every process of a run on a host: agent and guard first, then its tasks."""
    agents = [
        each
        for each in host.processes()
        if " ".join(each.argv).startswith(("tfcluster: agent", "tfcluster: guard"))
    ]
    assert agents
    for process in [*agents, *host.processes("TFCLUSTER_RUN")]:
        with suppress(ProcessLookupError):  # a script may start one sleep after another
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=4, private_home=frozenset({"node4"})))


@pytest.fixture
def slurm_hosts(testbed: Testbed) -> Site:
    """A site on the rig whose hosts also have Slurm."""
    return _site(testbed)


@pytest.fixture
def site(rig: Testbed) -> Iterator[Site]:
    yield _site(rig)
    rig.repair()


def _site(rig: Testbed) -> Site:
    account = rig.accounts[USER]
    folder = account.home / "trial"
    folder.mkdir(exist_ok=True)
    os.chown(folder, account.number, account.number)
    return Site(rig, folder)


def test_a_host_that_shares_no_files_gets_a_copy_of_them(site: Site) -> None:
    """node3 shares the folder, node4 does not."""
    project = site.folder / "project"
    site.command("mkdir", "-p", "project/conf")
    site.write("project/helper.py", "import pathlib, socket\nWORD = 'first'\n")
    site.write(
        "project/train.py",
        "from helper import *\n"
        "print('ran', socket.gethostname(), WORD, pathlib.Path.cwd(), flush=True)\n"
        "pathlib.Path('result').write_text(WORD)\n",
    )
    site.write(
        "project/cluster.yaml",
        "backend: ssh\nhosts: [node3, node4]\ntasks: {worker: 2}\n"
        "workdir: {sync: ~/copy}\nruntime: {strategy: none}\n"
        "command: python train.py\n",
    )
    launch = (*LAUNCH, str(project / "cluster.yaml"))
    copy = f"{site.rig.accounts[USER].home}/copy"
    code, said = site.command(*launch)
    assert code == 0, said
    assert f"ran node3 first {project}" in said
    assert f"ran node4 first {copy}" in said
    assert f"copied to {copy} on node4" in said
    site.write("project/helper.py", "import pathlib, socket\nWORD = 'second'\n")
    code, said = site.command(*launch)
    assert code == 0, said
    assert f"ran node4 second {copy}" in said
    node4 = site.rig.host("node4")
    assert node4.output(("cat", f"{copy}/result"), user=USER) == "second"
    node4.output(("sh", "-c", f"echo mine > {copy}/helper.py"), user=USER)
    site.write("project/helper.py", "import pathlib, socket\nWORD = 'third'\n")
    code, said = site.command(*launch)
    assert code == 4, said
    assert f"changed both on this machine and in {copy} on the host: helper.py" in said
    assert "ran node3" not in said


def _kernels(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"kernel (\S+)", said)]


def test_a_network_that_loses_all_for_ten_seconds_ends_nothing(site: Site) -> None:
    """TCP backs off its retransmissions, and the tasks print nothing meanwhile."""
    run = site.start("node[1-2]", 2, "echo up; sleep 26; echo through")
    site.up(2)
    login, node = site.rig.login, site.rig.host("node1")
    login.cable.drop_to(node.cable)
    node.cable.drop_to(login.cable)
    healed = time.monotonic() + 10
    eventually(lambda: time.monotonic() > healed, lambda: site.said, 15.0)
    login.cable.undrop()
    node.cable.undrop()
    assert run.wait(90) == 0, site.said
    assert site.said.count("| through") == 2


def test_hosts_are_asked_for_their_gpus(site: Site) -> None:
    """The login environment may say which GPUs are the user's."""
    profile = site.rig.accounts[USER].home / ".bashrc"
    # The tasks' bash also reads it, as its standard input is a socket.
    site.write(
        "../.bashrc",
        '[ "$(hostname)$TFCLUSTER_TASK" = node2 ] && export CUDA_VISIBLE_DEVICES=4,7\n',
    )
    try:
        run = site.start("node[1-2]", 4, 'echo "see ${CUDA_VISIBLE_DEVICES-all}"')
        assert run.wait(60) == 0, site.said
    finally:
        profile.unlink()
    seen = re.findall(r"(worker:\d) \| see (\S+)", site.said)
    assert sorted(seen) == [
        ("worker:0", "all"),
        ("worker:1", "all"),
        ("worker:2", "4"),
        ("worker:3", "7"),
    ]


RESUMING = """
import os, pathlib, time
import keras, numpy

keras.utils.set_random_seed(1)
x = numpy.arange(48.0).reshape(48, 1) / 48
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Told(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        size = os.environ.get("TFCLUSTER_SIZE", "1")
        print("epoch", epoch, "of", size, "ranks", flush=True)
        if epoch == 2:
            go = pathlib.Path("go")
            while not go.exists():
                time.sleep(0.05)


backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, 2 * x, batch_size=12, epochs=6, verbose=0, callbacks=[backup, Told()])
print("kernel %.6f" % model.get_weights()[0][0, 0], flush=True)
"""


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_the_training_goes_on_without_a_lost_host(site: Site) -> None:
    site.write("resuming.py", RESUMING)
    where = ("-n", "3", "--hosts", "node[1-3]", "--set", "backend=ssh")
    least = ("--set", "tasks.worker.min=2", "--set", "restart.max=1")
    with (site.folder / "said").open("wb") as said:
        run = site.rig.login.popen(
            [*LAUNCH, *where, *least, "--", "python", "resuming.py"],
            login=Login(user=USER, cwd=site.folder, env=site.environ),
            stdout=said,
        )
    eventually(lambda: site.said.count("epoch 2 of 3") == 3, lambda: site.said, 120.0)
    kill_run(site.rig.host("node2"))
    site.write("go", "")
    assert run.wait(180) == 0, site.said
    assert "restarting the training on the remaining hosts" in site.said
    assert "epoch 0 of 2" not in site.said, "it goes on from its checkpoint"
    assert site.said.count("epoch 5 of 2 ranks") == 2
    code, shown = site.command(sys.executable, "-m", "tfcluster", "status")
    assert code == 0
    assert "succeeded" in shown
    site.command("rm", "-r", "backup")
    code, alone = site.command(sys.executable, "resuming.py")
    assert code == 0, alone
    (expected,) = _kernels(alone)
    assert _kernels(site.said) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_a_host_joins_when_the_epoch_ends(site: Site) -> None:
    """The two hosts would stay in epoch 3 for ever; three go on."""
    stays = '        while epoch == 3 and size == "2":\n            time.sleep(0.05)\n'
    head, tail = RESUMING.split("\n\nbackup = ")
    script = f"{head}{stays}\n\nbackup = {tail}"
    site.command("rm", "-rf", "backup", "go")
    site.write("resuming.py", script)
    where = ("-n", "2", "--hosts", "node[1-2]", "--set", "backend=ssh")
    with (site.folder / "said").open("wb") as said:
        run = site.rig.login.popen(
            [*LAUNCH, *where, "--", "python", "resuming.py"],
            login=Login(user=USER, cwd=site.folder, env=site.environ),
            stdout=said,
        )
    eventually(lambda: site.said.count("epoch 2 of 2") == 2, lambda: site.said, 120.0)
    resize = (sys.executable, "-m", "tfcluster", "resize")
    code, told = site.command(*resize, "hosts+=node3")
    assert code == 0, told
    assert "from 2 to 3 workers" in told
    eventually(
        lambda: "all tasks will restart when epoch" in site.said,
        lambda: site.said,
        120.0,
    )
    assert "of 3 ranks" not in site.said
    site.write("go", "")
    assert run.wait(180) == 0, site.said
    assert "resized to 3 workers on node[1-3]" in site.said
    assert "epoch 0 of 3" not in site.said, "it goes on from its checkpoint"
    assert site.said.count("epoch 5 of 3 ranks") == 3
    site.command("rm", "-r", "backup")
    site.write("alone.py", RESUMING)
    code, alone = site.command(sys.executable, "alone.py")
    assert code == 0, alone
    (expected,) = _kernels(alone)
    assert _kernels(site.said) == pytest.approx([expected] * 3, rel=1e-5)
    site.command("rm", "-r", "backup", "go")


WAITING = "echo up $TFCLUSTER_SIZE; while [ ! -e {go} ]; do sleep 0.1; done"


def test_a_host_that_cannot_join_harms_nobody(site: Site) -> None:
    go = site.folder / "go-on"
    run = site.start("node[1-2]", 2, WAITING.format(go=go))
    site.up(2)
    resize = (sys.executable, "-m", "tfcluster", "resize")
    code, told = site.command(*resize, "hosts+=nowhere")
    assert code == 0, told
    eventually(lambda: "not resized: nowhere:" in site.said, lambda: site.said, 60.0)
    code, told = site.command(*resize, "hosts+=node2")
    assert code == 2
    assert "node2 is a host of the run already" in told
    code, told = site.command(*resize, "worker=3", "hosts+=node3:1")
    assert code == 0, told
    eventually(lambda: site.said.count("| up 3") == 3, lambda: site.said, 60.0)
    site.write(go.name, "")
    assert run.wait(60) == 0, site.said
    assert "may still be running" not in site.said
    site.command("rm", go.name)


def test_a_lost_host_that_answers_again_joins_again(site: Site) -> None:
    go = site.folder / "go-on"
    where = ("-n", "3", "--hosts", "node[1-3]", "--set", "backend=ssh")
    least = ("--set", "tasks.worker.min=2", "--set", "restart.max=1")
    plain = ("--set", "runtime.require_exchange=false", "--set", "workdir=/")
    script = WAITING.format(go=go)
    with (site.folder / "said").open("wb") as said:
        run = site.rig.login.popen(
            [*LAUNCH, *where, *least, *plain, "--", "bash", "-c", script],
            login=Login(user=USER, cwd=site.folder, env=site.environ),
            stdout=said,
        )
    eventually(lambda: site.said.count("| up 3") == 3, lambda: site.said, 60.0)
    kill_run(site.rig.host("node2"))
    eventually(lambda: site.said.count("| up 2") == 2, lambda: site.said, 60.0)
    eventually(lambda: site.said.count("| up 3") == 6, lambda: site.said, 60.0)
    assert "node2 answers again" in site.said
    site.write(go.name, "")
    assert run.wait(60) == 0, site.said
    code, shown = site.command(sys.executable, "-m", "tfcluster", "status")
    assert code == 0
    assert "resized to 3 workers on node[1-3]" in shown
    site.command("rm", go.name)


def test_a_cable_may_be_loose_for_a_moment(site: Site) -> None:
    run = site.start("node[1-2]", 2, "echo up; sleep 12; echo through")
    site.up(2)
    cable = site.rig.host("node1").cable
    cable.cut()
    # Not a wait for a condition: the run has to survive a fault of this length.
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(5.0)
    cable.heal()
    assert run.wait(60) == 0, site.said
    assert site.said.count("| through") == 2


def test_a_host_with_a_home_of_its_own(site: Site) -> None:
    run = site.start("node3,node4", 2, "echo up on $(hostname)")
    assert run.wait(60) == 0, site.said
    assert "logs are on node4 under " in site.said
    code, logs = site.command(sys.executable, "-m", "tfcluster", "logs")
    assert code == 0, logs
    assert "up on node3" in logs
    assert "up on node4" in logs


def test_hosts_that_do_not_answer_are_reported_together(site: Site) -> None:
    site.rig.host("node4").power_off()
    site.rig.host("node2").sshd.stop()
    run = site.start("node[2-4]", 3, "true")
    assert run.wait(60) == 3, site.said
    assert re.search("node4.*no (answer|route)", site.said), site.said
    assert re.search("node2.*refused the connection", site.said), site.said
    assert not site.rig.host("node3").processes("TFCLUSTER_RUN")


def test_a_host_without_power_ends_the_run(site: Site) -> None:
    run = site.start("node[1-3]", 3, "echo up; sleep 100")
    site.up(3)
    site.rig.host("node2").power_off()
    assert run.wait(60) == 5, site.said
    assert "node2 silent for 15 s" in site.said
    for name in ("node1", "node3"):
        assert not site.rig.host(name).processes("TFCLUSTER_RUN")


def test_hosts_that_slurm_has_lent(slurm_hosts: Site) -> None:
    how = ("--set", "backend=slurm", "--set", "launcher=ssh")
    plain = ("-n", "2", "--set", "runtime.strategy=none", *how)
    script = "echo up on $(hostname) by ${SSH_CONNECTION:+ssh}"
    argv = (*LAUNCH, *plain, "--", "bash", "-c", script)
    code, said = slurm_hosts.within("--nodes=2", "--ntasks-per-node=1", argv=argv)
    assert code == 0, said
    hosts = re.findall(r"up on (\S+) by ssh", said)
    assert len(set(hosts)) == 2, said

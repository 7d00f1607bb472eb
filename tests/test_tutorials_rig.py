"""The tutorials for two hosts and for Slurm, typed as the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.waiting import eventually
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.daemons import InsideProcess
from tests.rigs.testbed.fixtures import Factory
from tests.rigs.testbed.host import Login
from tests.test_docs import ROOT, blocks

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

USER = "alice"
PAGES = ROOT / "docs" / "tutorials"
BIN = Path(sys.executable).parent
DONE = re.compile(r"done \[.*\]")


class Person:
    """Somebody who works on the login host, in the folder of the first tutorial."""

    def __init__(self, rig: Testbed, page: str) -> None:
        self.rig = rig
        self.page = PAGES / f"{page}.md"
        self.folder = rig.accounts[USER].home / f"tutorial-{page}"
        self.environ = {
            "TFCLUSTER_STATE_DIR": str(self.folder / "state"),
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        }
        rig.login.output(("mkdir", "-p", str(self.folder)), user=USER)
        script = next(blocks(PAGES / "first-script.md", "python"))[0]
        self._write("train.py", script)
        self._write("cluster.yaml", next(blocks(self.page, "yaml"))[0])
        alone = self.type("python train.py")
        self.result = DONE.findall(alone.stdout)
        assert len(self.result) == 1, alone.stdout

    def _write(self, name: str, text: str) -> None:
        path = str(self.folder / name)
        self.rig.login.run(("tee", path), user=USER, stdin=text)

    def lines(self, heading: str) -> list[str]:
        """The commands of the page's section."""
        text = self.page.read_text(encoding="utf-8")
        section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        found = re.findall(r"^\$ (.*)$", section, re.MULTILINE)
        assert found, f"no commands in {heading!r}"
        return found

    def type(self, line: str) -> subprocess.CompletedProcess[str]:
        done = self.rig.login.run(
            ("bash", "-c", line),
            user=USER,
            cwd=self.folder,
            env=self.environ,
            timeout_s=150.0,
        )
        assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
        return done

    def start(self, line: str) -> InsideProcess:
        login = Login(user=USER, cwd=self.folder, env=self.environ)
        return self.rig.login.popen(("bash", "-c", line), login=login)


def test_two_hosts(testbed_factory: Factory) -> None:
    private = frozenset({"node1", "node2"})
    rig = testbed_factory(Options(nodes=2, private_home=private))
    person = Person(rig, "two-hosts")
    for line in person.lines("1. Log in without a question")[3:]:
        person.type(line)
    for host in rig.nodes:  # instead of the installation
        home = rig.accounts[USER].home
        host.output(("ln", "-s", os.fspath(BIN.parent), f"{home}/tf"), user=USER)
    doctor, plan, launch = person.lines("4. Check, then launch")
    assert "no problems found" in person.type(doctor).stderr
    assert "node2" in person.type(plan).stdout
    assert DONE.findall(person.type(launch).stdout) == person.result * 4
    for line in person.lines("5. The model"):
        person.type(line)
    assert (person.folder / "model.keras").stat().st_size > 0
    rig.down()


def test_slurm(testbed: Testbed) -> None:
    person = Person(testbed, "slurm")
    (dry_run,) = person.lines("3. See the job before you submit it")
    assert "#SBATCH --account=project" in person.type(dry_run).stdout
    launch, detached, status, logs = person.lines("4. Launch")
    followed = person.type(launch)
    assert DONE.findall(followed.stdout) == person.result * 4
    run = person.type(detached).stdout.strip()
    assert run in person.type(status).stdout
    following = person.start(logs)
    output, _ = following.communicate(timeout=150.0)
    assert DONE.findall(output.decode()) == person.result * 4
    eventually(
        lambda: f"{run}  succeeded" in person.type(status).stdout,
        lambda: person.type(status).stdout,
        30.0,
    )
    (doctor,) = person.lines("5. If something is wrong")
    assert "no problems found" in person.type(doctor).stderr

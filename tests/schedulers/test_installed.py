"""A scheduler that a site has installed, with an entry point and no change of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfcluster import schedulers
from tfcluster.base.isolated_import import PACKAGE_ROOT

MODULE = '''
from dataclasses import dataclass
from tfcluster.schedulers.base import BatchScheduler, placeholders, setting
from tfcluster.schedulers.options import OptionTable
import re

@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is requested from Acme."""
    lanes: int | None = setting("count", "How many lanes.")
    options: tuple[str, ...] = setting("options", "More options.", ())

class Acme(BatchScheduler):
    name, title, launcher = "acme", "Acme", "acmesh"
    settings = Settings
    options = OptionTable(
        command="asub", plain=re.compile(".*"), denied={"-x": "it explodes"}
    )
    synonyms = {"tracks": "lanes"}
    submit_command = "asub"
    def is_inside(self, env):
        return "ACME" in env
    def expected(self, description):
        lanes = self.settings_in(description).lanes
        return self.granted(description, placeholders(lanes or 1, 1))
    def directives(self, description, settings, launcher):
        yield f"#ACME {settings.lanes}"

SCHEDULER = Acme()
'''
FILE = """\
backend: acme
command: python train.py
tasks: {worker: 2}
acme: {lanes: 2}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which the scheduler is installed."""
    (tmp_path / "acme_tf.py").write_text(MODULE)
    info = tmp_path / "acme_tf-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tf\nVersion: 1\n")
    entry = f"[{schedulers.GROUP}]\nacme = acme_tf:SCHEDULER\n"
    (info / "entry_points.txt").write_text(entry)
    return tmp_path


def tfcluster(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{site}:{PACKAGE_ROOT}"}
    env["TFCLUSTER_STATE_DIR"] = str(site / "state")
    argv = [sys.executable, "-m", "tfcluster", *words]
    return subprocess.run(
        argv, capture_output=True, text=True, env=env, cwd=site, check=False
    )


def test_its_section_and_its_jobs(site: Path) -> None:
    (site / "cluster.yaml").write_text(FILE)
    planned = tfcluster(site, "plan", "cluster.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "<node 2>" in planned.stdout
    script = tfcluster(site, "submit", "--dry-run", "cluster.yaml")
    assert "#ACME 2\n" in script.stdout


def test_what_it_refuses(site: Path) -> None:
    text = FILE.replace("{lanes: 2}", "{tracks: 2, options: [-x]}")
    (site / "cluster.yaml").write_text(text)
    refused = tfcluster(site, "plan", "cluster.yaml")
    assert refused.returncode == 2
    assert "unknown key 'tracks' (did you mean 'lanes'?)" in refused.stderr
    assert "option -x is not allowed (it explodes)" in refused.stderr


def test_one_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    refused = tfcluster(tmp_path, "plan", "cluster.yaml")
    assert refused.returncode == 2
    assert "unknown backend 'acme'" in refused.stderr
    assert schedulers.find("acme") is None


def test_those_of_this_package_are_its_folders() -> None:
    assert schedulers.names() == ("local", "lsf", "pbs", "sge", "slurm", "ssh")
    for name in schedulers.names():
        assert schedulers.get(name).name == name

"""Results come back from a host that does not share the working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.kit.cluster import COMMAND, Running
from tests.kit.json_formats import assert_format
from tests.kit.waiting import eventually
from tests.schedulers.ssh.conftest import Site

HIDE = 'mount -t tmpfs none "$1"; shift; exec "$@"'


UNTIL_GO = "echo up; until [ -e go ]; do sleep 0.05; done"


class Project:
    """A folder here, of which ``one`` has a copy in ``~/copy``."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.here = site.folder / "project"
        self.here.mkdir()
        # To the host, the folder is another one, so that it gets a copy.
        unshare = ("unshare", "--mount", "sh", "-c", HIDE, "sh", str(self.here))
        self.server = site.host("one", prefix=unshare)
        self.there = self.server.home / "copy"

    def start(self, script: str, results: str = '["*.keras", "logs/"]') -> Running:
        command = json.dumps(["bash", "-c", script])
        (self.here / "cluster.yaml").write_text(
            "backend: ssh\nhosts: [one]\ntasks: {worker: 1}\n"
            f"workdir: {{sync: ~/copy, results: {results}}}\n"
            f"runtime: {{strategy: none}}\ngrace: 1s\ncommand: {command}\n"
        )
        return self.site.cluster.start(str(self.here / "cluster.yaml"))

    def fetch(self, *words: str) -> CompletedProcess[str]:
        return self.site.cluster.command("fetch", *words)

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.here)): path.read_text()
            for path in sorted(self.here.rglob("*"))
            if path.is_file() and path.name != "cluster.yaml"
        }


@pytest.fixture
def project(site: Site) -> Project:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a host with its own files needs root and unshare")
    return Project(site)


def results(run: Running) -> dict[str, Any]:
    found: list[dict[str, Any]] = run.status()["results"]
    assert len(found) == 1, found
    return found[0]


def test_results_are_here_when_a_run_has_ended(project: Project) -> None:
    run = project.start(
        "mkdir -p logs/a; echo weights > model.keras; echo line > logs/a/events; "
        "echo no > other; ln -s /etc/hostname logs/link; printf x > $'logs/a\\nb\\xff'"
    )
    assert run.end() == 0, run.err
    here = project.files()
    assert here["model.keras"] == "weights\n"
    assert here["logs/a/events"] == "line\n"
    assert here["logs/a\nb\udcff"] == "x"
    assert len(here) == 3
    assert "results from one: 3 files" in run.err
    link = "logs/link: it is a link that leads out of the working directory"
    assert f"not fetched from one: {link}" in run.err
    said = results(run)
    assert (said["state"], said["fetched"], said["missed_count"]) == (
        "incomplete",
        3,
        1,
    )
    # The next launch leaves alone what has come from the host, and sends it nowhere.
    again = project.start("rm logs/link; cat model.keras; echo more >> logs/a/events")
    assert again.end() == 0, again.err
    assert "weights" in again.out
    assert project.files()["logs/a/events"] == "line\nmore\n"
    said = results(again)
    assert (said["state"], said["fetched"], said["unchanged"]) == ("fetched", 1, 2)
    assert said["sent_bytes"] == len("line\nmore\n")


def test_results_of_a_failed_run_and_a_newer_file_here(project: Project) -> None:
    (project.here / "model.keras").write_text("of here")
    future = time.time() + 3600
    run = project.start(f"echo of there > model.keras; {UNTIL_GO}; exit 33")
    run.up()
    os.utime(project.here / "model.keras", (future, future))
    done = project.fetch(run.run, "*.keras")
    assert done.returncode == 0, done.stderr
    assert "not replaced by the file of one: model.keras: the one here is newer" in (
        done.stderr
    )
    assert project.files() == {"model.keras": "of here"}
    (project.there / "go").touch()
    assert run.end() == 33
    assert "results from one: 0 files, 0 B" in run.err
    forced = project.fetch(run.run, "--force", "--json")
    assert forced.returncode == 0, forced.stderr
    found = json.loads(forced.stdout)
    assert_format("fetch", found)
    assert found["hosts"][0]["fetched"] == 1
    assert project.files()["model.keras"] == "of there\n"


@pytest.mark.slow
def test_all_hosts_and_an_uncopied_folder(project: Project) -> None:
    """Without ``sync``, the host has another folder at the same path."""
    script = f"cd {project.here} && mkdir -p out && echo 1 > out/a.csv"
    given = ("-n", "1", "--hosts", "one", "--set", "backend=ssh")
    plain = ("--set", "runtime.strategy=none", "--set", f"workdir.path={project.here}")
    results = ("--set", "workdir.results={patterns: [out/*.csv], all: true}")
    command = (*given, *plain, *results, "--", "bash", "-c", script)
    run = project.site.cluster.start(*command)
    assert run.end() == 0, run.err
    assert project.files() == {"results-by-host/one/out/a.csv": "1\n"}
    done = project.fetch(run.run, "out/")
    assert done.returncode == 0, done.stderr
    assert project.files()["out/a.csv"] == "1\n"


@pytest.mark.slow
def test_a_host_that_shares_the_folder_has_nothing_to_send(site: Site) -> None:
    site.host("one")
    options = ("--set", 'workdir.results=["*.keras"]')
    run = site.launch("echo x > a.keras", "one", *options)
    assert run.end() == 0, run.err
    assert run.found("results")[0]["state"] == "shared"
    assert "incomplete" not in run.err
    done = site.cluster.command("fetch", run.run)
    assert done.returncode == 0, done.stderr
    assert "one shares the working directory: nothing to fetch" in done.stderr
    wrong = site.cluster.command("fetch", run.run, "../x", "/etc/passwd", "a//b")
    assert wrong.returncode == 2
    assert len(wrong.stderr.splitlines()) == 3


@pytest.mark.slow
def test_a_cut_fetch_leaves_nothing_and_may_be_repeated(project: Project) -> None:
    size = 60_000_000
    run = project.start(f"head -c {size} /dev/urandom > big.keras; {UNTIL_GO}")
    run.up()
    fetching = subprocess.Popen(
        [*COMMAND, "fetch", run.run],
        env=project.site.cluster.environ,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: part(project) > 1 << 20, lambda: "nothing comes", 20.0)
        project.server.cut()
        assert run.end() == 5, run.err
        assert fetching.wait(20) == 1
    finally:
        fetching.kill()
    assert results(run)["state"] == "incomplete"
    assert run.found("results")[0]["missed"] == [["big.keras", "not fetched"]]
    assert part(project) == 0
    assert not (project.here / "big.keras").exists()
    done = project.fetch(run.run, "--json")
    assert done.returncode == 0, done.stderr
    host = json.loads(done.stdout)["hosts"][0]
    assert host["fetched"] == 1
    assert host["sent_bytes"] == size
    here, there = project.here / "big.keras", project.there / "big.keras"
    assert here.read_bytes() == there.read_bytes()
    assert part(project) == 0


def part(project: Project) -> int:
    """How many bytes of a file that is not complete are here."""
    found = project.here.glob(".tfcluster-part-*")
    return sum(path.stat().st_size for path in found)

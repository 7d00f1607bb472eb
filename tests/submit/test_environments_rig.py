"""Environment modules that hosts load before tasks start, with each backend."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.launch.test_requirements import wheel
from tests.rigs.testbed import Testbed, packages
from tests.schedulers.sge.site import USER, Site, site_on

pytestmark = [pytest.mark.timeout(300)]

# The Python on the PATH is the module's; the agents run under another one.
_PYTHON = f'#!/bin/sh\nexport BY=module\nexec {sys.executable} "$@"\n'
_SHOW = (
    "import os; print('seen', os.uname().nodename, *map(os.environ.get, ('FOO', 'BY')))"
)


@pytest.fixture
def site(testbed: Testbed, request: pytest.FixtureRequest) -> Iterator[Site]:
    packages.require(["modules"])
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    yield from site_on(testbed, testbed.accounts[USER].home / name, sys.executable)
    testbed.login.run(("scancel", f"--user={USER}"), user=USER)


def _write(site: Site, **keys: object) -> None:
    """A modulefile, what it offers, and a configuration for all backends."""
    site.login.output(("mkdir", "-p", "modules", "bin"), user=USER, cwd=site.folder)
    module = f"#%Module\nsetenv FOO loaded\nprepend-path PATH {site.folder}/bin\n"
    site.write(site.folder / "modules" / "demo", module)
    site.write(site.folder / "bin" / "python", _PYTHON)
    site.login.output(("chmod", "755", "bin/python"), user=USER, cwd=site.folder)
    site.write(site.folder / "show.py", _SHOW)
    content = {
        "command": "python show.py",
        "tasks": {"worker": 2},
        "runtime": {"strategy": "none"},
        "hosts": ["node1", "node2"],
        "slurm": {"nodes": 2, "tasks_per_node": 1},
        "sge": {"parallel_environment": "tf"},
        "setup": ["module use modules", "module load demo"],
        **keys,
    }
    site.write(site.folder / "cluster.yaml", yaml.safe_dump(content))


@pytest.mark.parametrize("backend", ["ssh", "slurm", "sge"])
def test_tasks_have_what_the_lines_have_loaded(site: Site, backend: str) -> None:
    _write(site)
    launch = site.start("launch", "cluster.yaml", "--set", f"backend={backend}")
    code, said = site.finish(launch, 120.0)
    assert code == 0, said
    logs = site.state.glob("runs/*/logs/worker-*.log")
    seen = re.findall(r"seen ([\w.]+) (.*)", "".join(p.read_text() for p in logs))
    assert [words for _, words in seen] == ["loaded module"] * 2, said
    hosts = {task["host"].partition(".")[0] for task in site.status()["tasks"]}
    assert {host for host, _ in seen} == hosts
    site.nothing_is_left()


def test_hosts_make_an_environment_together(site: Site) -> None:
    """Over SSH; the hosts share the cache, so that one of them makes it."""
    wheel(site.folder / "wheels")
    text = "--no-index\n--find-links wheels\ndemo\n"
    site.write(site.folder / "requirements.txt", text)
    _write(
        site,
        setup=["true"],
        command="python -c 'import demo, sys; print(demo.VALUE, sys.prefix)'",
        python=sys.executable,
        env={"XDG_CACHE_HOME": str(site.folder / "cache")},
        requirements="requirements.txt",
    )
    given = ("cluster.yaml", "--set", "backend=ssh")
    code, said = site.finish(site.start("setup", *given), 200.0)
    assert code == 0, said
    assert said.count("making the environment of requirements.txt") == 1
    (made,) = site.folder.glob("cache/tfcluster/environments/*/bin/python")
    assert said.count(f"  {made}\n") == 2
    code, said = site.finish(site.start("launch", *given), 120.0)
    assert code == 0, said
    assert "making" not in said
    logs = site.state.glob("runs/*/logs/worker-*.log")
    assert {p.read_text() for p in logs} == {f"1 {made.parent.parent}\n"}
    site.write(site.folder / "requirements.txt", f"{text}nosuch\n")
    code, said = site.finish(site.start("launch", *given), 120.0)
    assert code == 4, said
    assert "requirements.txt: pip install failed with exit status 1" in said
    assert "No matching distribution found for nosuch" in said
    site.nothing_is_left()


def test_a_line_that_fails_ends_the_launch(site: Site) -> None:
    """A bad line on one host only; `doctor` finds it, too."""
    line = "[ $(uname -n) = node1 ] || module load nosuch"
    _write(site, setup=["export A=1", line])
    given = ("cluster.yaml", "--set", "backend=ssh")
    code, said = site.finish(site.start("launch", *given), 120.0)
    expected = f"node2: setup line 2, `{line}`, failed with exit status 1"
    assert code == 4, said
    assert expected in said
    assert "Unable to locate a modulefile for 'nosuch'" in said
    code, said = site.finish(site.start("doctor", *given, "--quick"), 120.0)
    assert code == 4
    assert expected.replace(":", ": error:", 1) in said
    site.nothing_is_left()

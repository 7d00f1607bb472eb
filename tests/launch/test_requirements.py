"""``requirements``: environments that are made on hosts that lack them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.kit.cluster import DEADLINE_S, Cluster, Running
from tests.kit.machine import agent_of, children
from tests.kit.oracle import assert_nothing_left
from tests.kit.waiting import eventually
from tests.launch.uv import installed_uv

# Without a pip that it can lend, an environment gets its own, which takes long.
PATIENCE_S = 2 * DEADLINE_S
SHOW = "import demo, sys; print('demo', demo.VALUE, sys.prefix, flush=True)"
LONG = "setup: [sleep 5]\n"
# Agents end if the launcher sends nothing for 2 s.
IMPATIENT = """\
from tfcluster.cli import main
from tfcluster.launcher import agent_connection, brief_contacts
agent_connection.LEASE_S = 2.0
brief_contacts.HEARTBEAT_S = 0.5
main()
"""
CONFIG = """\
command: python -c "{code}"
python: {python}
tasks: {{worker: 2}}
runtime: {{strategy: none}}
requirements: {requirements}
"""


def wheel(folder: Path, value: int = 1, version: str = "1.0") -> None:
    """A wheel of a package with one module, as pip wants it and no more."""
    folder.mkdir(exist_ok=True)
    info = f"demo-{version}.dist-info"
    files = {
        "demo.py": f"VALUE = {value}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with ZipFile(folder / f"demo-{version}-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)


@pytest.fixture
def home(cluster: Cluster, tmp_path: Path) -> Path:
    """The cache of the cluster's commands, and requirements with a wheel."""
    cluster.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    cluster.environ["PATH"] = _without_uv(cluster.environ)
    wheel(cluster.folder / "wheels")
    text = "--no-index\n--find-links wheels\ndemo\n"
    (cluster.folder / "requirements.txt").write_text(text)
    return tmp_path / "cache" / "tfcluster" / "environments"


def _without_uv(environ: Mapping[str, str]) -> str:
    """The PATH without the folders that have uv."""
    folders = environ["PATH"].split(os.pathsep)
    return os.pathsep.join(f for f in folders if not Path(f, "uv").exists())


def config(cluster: Cluster, code: str = SHOW, **keys: str) -> str:
    words = {"python": sys.executable, "requirements": "requirements.txt", **keys}
    return cluster.file(CONFIG.format(code=code, **words))


def started(cluster: Cluster, code: str = SHOW, **keys: str) -> Running:
    return cluster.start(config(cluster, code, **keys))


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def made(home: Path) -> list[Path]:
    return sorted(path.parent for path in home.glob("*/tfcluster-complete.json"))


def test_an_environment_is_made_once(cluster: Cluster, home: Path) -> None:
    path = config(cluster)
    plan = json.loads(cluster.command("plan", path, "--json").stdout)
    assert plan["requirements"]["file"] == "requirements.txt"
    assert "demo" in cluster.command("plan", path).stdout
    assert not home.exists()
    running = cluster.start(path)
    assert running.end() == 0, running.err
    (environment,) = made(home)
    for task in ("worker:0", "worker:1"):
        assert running.text(task) == f"demo 1 {environment}\n"
    assert "localhost: making the environment of requirements.txt" in running.err
    assert f"localhost: made {environment} in " in running.err
    assert "Successfully installed demo" in running.log("setup-localhost").read_text()
    again = cluster.start(path)
    assert again.end() == 0
    assert "localhost: ma" not in again.err
    assert again.text("worker:1") == f"demo 1 {environment}\n"
    assert made(home) == [environment]
    assert_nothing_left(again)


@pytest.mark.slow
def test_setup_makes_it_and_clean_removes_it(cluster: Cluster, home: Path) -> None:
    path = config(cluster)
    done = cluster.command("setup", path)
    assert done.returncode == 0, done.stderr
    (environment,) = made(home)
    assert done.stdout.split()[-1] == f"{environment}/bin/python"
    assert "localhost: making the environment of requirements.txt" in done.stderr
    kept = cluster.command("clean", "--environments")
    assert "removed 0 runs, 0 crash files and 0 environments" in kept.stderr
    done = cluster.command("clean", "--environments", "--older-than", "0s")
    assert done.returncode == 0
    assert f"{environment}  (used " in done.stdout
    assert not environment.exists()


@pytest.mark.exhaustive
def test_one_in_use_is_kept(cluster: Cluster, home: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    running = started(cluster, code).up(count=2)
    (environment,) = made(home)
    done = cluster.command("clean", "--environments", "--older-than", "0s")
    assert f"kept {environment}: it is in use" in done.stderr
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert made(home) == [environment]


@pytest.mark.exhaustive
def test_what_it_depends_on(cluster: Cluster, home: Path) -> None:
    """A local package that changes makes another one, although the text is the same."""
    assert cluster.command("setup", config(cluster)).returncode == 0
    wheel(cluster.folder / "wheels", value=22, version="1.1")
    running = started(cluster)
    assert running.end() == 0, running.err
    assert "demo 22 " in running.text("worker:0")
    assert len(made(home)) == 2


def test_a_package_that_does_not_exist(cluster: Cluster, home: Path) -> None:
    text = "--no-index\n--find-links wheels\ndemo\nnosuch==9\n"
    (cluster.folder / "requirements.txt").write_text(text)
    running = started(cluster)
    assert running.end() == 4
    cause = "requirements.txt: pip install failed with exit status 1"
    assert f"localhost: {cause}" in running.err
    assert "No matching distribution found for nosuch==9" in running.err
    assert cause in running.report()["first_failure"]["cause"]
    assert made(home) == []
    assert not [path for path in home.iterdir() if path.is_dir()]
    done = cluster.command("setup", config(cluster))
    assert done.returncode == 4
    assert cause in done.stderr
    assert "nosuch==9" in done.stderr


@pytest.mark.slow
def test_a_half_made_one_is_never_used(cluster: Cluster, home: Path) -> None:
    """Ctrl-C ends pip, and nobody uses what it has left."""
    building = slow_package(cluster)
    running = started(cluster)
    eventually(building.exists, lambda: running.err, DEADLINE_S)
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert_nothing_left(running)
    assert made(home) == []
    (half,) = (path for path in home.iterdir() if path.is_dir())
    (half / "rest").touch()
    building.unlink()
    again = started(cluster)
    eventually(building.exists, lambda: again.err, DEADLINE_S)
    assert not (half / "rest").exists()
    again.signal(signal.SIGINT)
    assert again.end() == 130


SLOW_PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "demo"
version = "2"
"""


def slow_package(cluster: Cluster) -> Path:
    """Requirements whose installation does not end; the file exists once it runs."""
    source, building = cluster.folder / "slow", cluster.folder / "building"
    source.mkdir()
    (source / "pyproject.toml").write_text(SLOW_PROJECT)
    (source / "backend.py").write_text(
        f"import time\nopen({str(building)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    text = "--no-index\n--find-links wheels\n./slow\n"
    (cluster.folder / "requirements.txt").write_text(text)
    return building


@pytest.mark.exhaustive
@pytest.mark.parametrize("whom", ["launcher", "agent"])
def test_a_kill_ends_pip(cluster: Cluster, home: Path, whom: str) -> None:
    building = slow_package(cluster)
    running = started(cluster)
    eventually(building.exists, lambda: running.err, DEADLINE_S)
    _, agent = agent_of(running.process.pid)
    os.kill(running.process.pid if whom == "launcher" else agent, signal.SIGKILL)
    assert running.end() == (-signal.SIGKILL if whom == "launcher" else 4)
    assert_nothing_left(running, report=whom == "agent")
    assert made(home) == []


@pytest.mark.exhaustive
def test_a_maker_that_is_killed(cluster: Cluster, home: Path) -> None:
    """For example for its memory; its pip must not go on."""
    building = slow_package(cluster)
    running = started(cluster)
    eventually(building.exists, lambda: running.err, DEADLINE_S)
    _, agent = agent_of(running.process.pid)
    (maker,) = (p for p in children(agent) if "environment_maker" in command_line(p))
    os.kill(maker, signal.SIGKILL)
    assert running.end() == 4
    assert (
        "the maker of the environment ended early: it was killed by SIGKILL"
        in running.err
    )
    assert_nothing_left(running)
    assert made(home) == []


@pytest.mark.slow
def test_makers_at_the_same_time_make_one(cluster: Cluster, home: Path) -> None:
    path = config(cluster)
    both = [cluster.start(path), cluster.start(path)]
    assert [running.end() for running in both] == [0, 0]
    said = "".join(running.err for running in both)
    assert said.count("making the environment of") == 1
    assert len(made(home)) == 1


@pytest.mark.exhaustive
def test_packages_of_the_interpreter_below(cluster: Cluster, home: Path) -> None:
    """Also those of a virtual environment, which venv alone would pass over."""
    below = cluster.folder / "below"
    argv = [sys.executable, "-m", "venv", "--without-pip", str(below)]
    subprocess.run(argv, check=True)
    (packages,) = below.glob("lib/python*/site-packages")
    (packages / "shown.py").write_text("VALUE = 5\n")
    code = "import demo, shown; print(demo.VALUE, shown.VALUE)"
    asked = "{file: requirements.txt, system_site_packages: true}"
    python = str(below / "bin" / "python")
    running = started(cluster, code, python=python, requirements=asked)
    assert running.end(PATIENCE_S) == 0, running.err
    assert running.text("worker:0") == "1 5\n"
    alone = started(cluster, code, python=python)
    assert alone.end(PATIENCE_S) == 1
    assert "No module named 'shown'" in alone.text("worker:0")


@pytest.mark.exhaustive
def test_an_environment_below_a_command(cluster: Cluster, home: Path) -> None:
    python = f"[env, X=1, {sys.executable}]"
    code = SHOW.replace("demo.VALUE", "__import__('os').environ['X']")
    running = started(cluster, code, python=python)
    assert running.end() == 0, running.err
    (environment,) = made(home)
    assert running.text("worker:0") == f"demo 1 {environment}\n"


@pytest.mark.exhaustive
def test_the_python_of_setup_lines_is_its_base(cluster: Cluster, home: Path) -> None:
    below = cluster.folder / "below"
    subprocess.run([sys.executable, "-m", "venv", str(below)], check=True)
    text = Path(config(cluster)).read_text().replace(f"python: {sys.executable}\n", "")
    path = cluster.file(f"{text}setup: [. below/bin/activate]\n")
    running = cluster.start(path)
    assert running.end() == 0, running.err
    (environment,) = made(home)
    assert running.text("worker:0") == f"demo 1 {environment}\n"


@pytest.mark.exhaustive
def test_uv_makes_it_where_it_is_there(
    cluster: Cluster, home: Path, tmp_path: Path
) -> None:
    uv = Path(installed_uv(tmp_path))
    folder = cluster.folder / "bin"
    folder.mkdir()
    (folder / "uv").symlink_to(uv)
    cluster.environ["PATH"] = f"{folder}{os.pathsep}{cluster.environ['PATH']}"
    project = '[project]\nname = "x"\ndependencies = ["demo"]\n'
    (cluster.folder / "pyproject.toml").write_text(project)
    cluster.environ["UV_NO_INDEX"] = "1"
    cluster.environ["UV_FIND_LINKS"] = str(cluster.folder / "wheels")
    running = started(cluster, requirements="pyproject.toml")
    assert running.end() == 0, running.err
    assert f"making the environment of pyproject.toml with {folder}/uv" in running.err
    (environment,) = made(home)
    assert running.text("worker:1") == f"demo 1 {environment}\n"


@pytest.mark.slow
def test_agents_are_kept_while_hosts_are_set_up(cluster: Cluster) -> None:
    """``setup`` is as patient as pip: an agent that hears nothing would end."""
    path = cluster.file(f"command: python x.py\ntasks: {{worker: 1}}\n{LONG}")
    argv = [sys.executable, "-c", IMPATIENT, "setup", path]
    done = subprocess.run(
        argv, env=cluster.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

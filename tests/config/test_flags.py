"""Configurations that result from ``--set``, ``--name``, or flags without a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, loaded
from tfcluster.config import Loaded, command_stem, from_command
from tfcluster.plan.model import Host, Strategy, TaskGroup


def _loaded(
    tmp_path: Path,
    *,
    command: tuple[str, ...] = ("python", "train.py"),
    count: int = 2,
    ps: int = 0,
    hosts: str | None = None,
    overrides: tuple[str, ...] = (),
    name: str | None = None,
) -> Loaded:
    return from_command(
        command,
        count=count,
        ps=ps,
        hosts=hosts,
        overrides=overrides,
        name=name,
        environ={"DATA": "/data"},
        cwd=tmp_path,
        python="/usr/bin/python3",
    )


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    overrides = [
        "tasks.worker=4",
        "tasks.worker.gpus=1",
        "tasks.ps=1",
        "runtime.synchronous=true",
        "backend=ssh",
        "hosts=[a, 'n[1-2]']",
        "name=other",
        "command=python other.py --x",
    ]
    description = loaded(tmp_path, overrides=overrides).description
    assert description.tasks == {
        "worker": TaskGroup(count=4, gpus=1),
        "ps": TaskGroup(count=1),
    }
    assert description.runtime.strategy is Strategy.PARAMETER_SERVER
    assert description.runtime.synchronous
    assert description.backend == "ssh"
    assert [host.name for host in description.hosts] == ["a", "n1", "n2"]
    assert (description.name, description.named) == ("other", True)
    assert description.command == ("python", "other.py", "--x")


def test_the_last_override_wins(tmp_path: Path) -> None:
    overrides = ["tasks.worker=4", "tasks.worker=5"]
    assert loaded(tmp_path, overrides=overrides).description.tasks["worker"].count == 5


def test_null_takes_a_key_out(tmp_path: Path) -> None:
    content = f"{SMALLEST}env: {{A: b}}\nname: x\n"
    overrides = ["env=null", "name=~", "grace=null"]
    description = loaded(tmp_path, content, overrides=overrides).description
    assert description.env == {}
    assert not description.named


def test_environment_values_are_text_as_they_stand(tmp_path: Path) -> None:
    overrides = [
        "env.A=010",
        "env.B=no",
        "env.C=a: b = c",
        "env.D=",
        "env.E=${DATA}/x",
        "tasks.worker.env.F=2.10",
    ]
    description = loaded(tmp_path, overrides=overrides).description
    assert description.env == {
        "A": "010",
        "B": "no",
        "C": "a: b = c",
        "D": "",
        "E": "/data/digits/x",
    }
    assert description.tasks["worker"].env == {"F": "2.10"}


def test_the_name_flag_wins_over_all(tmp_path: Path) -> None:
    content = f"{SMALLEST}name: a\n"
    result = loaded(tmp_path, content, overrides=["name=b"], name="c")
    assert (result.description.name, result.description.named) == ("c", True)
    assert result.description.origins["name"] == "--name"


def test_origins(tmp_path: Path) -> None:
    content = f"{SMALLEST}runtime: {{batch: global}}\nhosts: [a,\n  b]\n"
    description = loaded(tmp_path, content, overrides=["tasks.ps=1"]).description
    file = tmp_path / "cluster.yaml"
    assert description.origins == {
        "command": f"{file}:1:10",
        "tasks.worker": f"{file}:2:17",
        "tasks.ps": "--set tasks.ps=1",
        "runtime.batch": f"{file}:3:18",
        "hosts": f"{file}:4:8",
    }


# Without a file.


def test_flags_alone(tmp_path: Path) -> None:
    result = _loaded(tmp_path)
    description = result.description
    assert result.warnings == ()
    assert description.backend == "local"
    assert description.command == ("python", "train.py")
    assert description.tasks == {"worker": TaskGroup(count=2)}
    assert (description.name, description.named) == ("train", False)
    assert description.workdir == tmp_path
    assert description.python == ("/usr/bin/python3",)
    assert description.source == "command line"
    assert description.origins == {"command": "command line", "tasks.worker": "-n"}


def test_flags_with_parameter_servers_and_hosts(tmp_path: Path) -> None:
    hosts = "a,b:4,n[1-2]:2,[::1]:3,[::2]"
    description = _loaded(tmp_path, ps=1, hosts=hosts, name="x").description
    assert description.backend == "ssh"
    assert description.hosts == (
        Host(name="a"),
        Host(name="b", slots=4),
        Host(name="n1", slots=2),
        Host(name="n2", slots=2),
        Host(name="::1", slots=3),
        Host(name="::2"),
    )
    assert description.tasks["ps"] == TaskGroup(count=1)
    assert description.runtime.strategy is Strategy.PARAMETER_SERVER
    assert (description.name, description.named) == ("x", True)


def test_the_command_of_the_command_line_is_taken_as_it_is(tmp_path: Path) -> None:
    command = (
        "bash",
        "-c",
        "echo $$ $HOME ${DATA} ${NONE} | cat; 'x",
        "",
        "ab\udc80\n",
    )
    assert _loaded(tmp_path, command=command).description.command == command


def test_overrides_without_a_file(tmp_path: Path) -> None:
    overrides = ("tasks.evaluator=1", "env.A=${DATA}", "backend=slurm")
    description = _loaded(tmp_path, overrides=overrides).description
    assert description.backend == "slurm"
    assert description.env == {"A": "/data"}
    assert list(description.tasks) == ["worker", "evaluator"]


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        ("python train.py --x", "train"),
        ("/usr/bin/python3.11 -u /a/b/train.py", "train"),
        ("python -X dev -W error train.py", "train"),
        ("python -m pkg.train", "pkg.train"),
        ("python -c pass", "python"),
        ("python", "python"),
        ("./run.sh x", "run"),
        ("torchrun x.py", "torchrun"),
        ("", ""),
    ],
)
def test_the_stem_of_a_command(command: str, stem: str) -> None:
    assert command_stem(command.split()) == stem

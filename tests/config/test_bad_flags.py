"""Invalid flags, and how several problems are reported together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import ENVIRON, SMALLEST, problems, write
from tfcluster.base.errors import ConfigError, ExitCode
from tfcluster.config import from_command, load

# Flags.


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tasks.worker=abc", "'worker' must be a whole number; found abc"),
        ("tasks.worker.count=0", "'count' must be a whole number of at least 1"),
        ("tasks.wroker=1", "unknown key 'wroker' (did you mean 'worker'?)"),
        ("tasks.worker", "not KEY=VALUE (like --set tasks.worker=4)"),
        ("=1", "not KEY=VALUE"),
        ("a..b=1", "not KEY=VALUE"),
        (".".join("abcdefghi") + "=1", "not KEY=VALUE"),
        ("hosts.a=1", "'hosts' must be a list; found a mapping"),
        ("command.a=1", "'command' is not a mapping: a cannot be set in it"),
        ("name=", "'name' is empty"),
        ("name=[", "a '[' or '{' is not closed"),
        ("name=!!str x", "YAML tags are not allowed"),
        ("backend=slrum", "unknown backend 'slrum' (did you mean 'slurm'?)"),
        ("name=\udc80", "control character U+DC80"),
    ],
)
def test_a_bad_override(setting: str, words: str, tmp_path: Path) -> None:
    reported = problems(tmp_path, SMALLEST, overrides=[setting])
    (line,) = [str(problem) for problem in reported]
    flag, _, rest = line.partition(": error: ")
    assert flag.startswith("--set ")
    assert flag.isprintable()
    assert rest.startswith(words)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"count": 0}, "-n: error: 'worker' must be a whole number of at least 1"),
        ({"ps": -1}, "--ps: error: 'ps' must be a whole number of at least 1"),
        ({"hosts": "a,,b"}, "--hosts: error: 'a,,b': an empty item"),
        ({"hosts": ""}, "--hosts: error: '': no host is given"),
        (
            {"hosts": "a:0"},
            "--hosts: error: 'slots' must be a whole number of at least",
        ),
        ({"hosts": "a,a"}, "--hosts: error: 'a' is already listed at --hosts"),
        ({"hosts": "::1:4"}, "--hosts: error: '::1:4': write IPv6 as"),
        ({"name": "a b"}, "--name: error: 'name' must be at most 64 letters"),
        ({"command": []}, "command line: error: 'command' is empty"),
        ({"command": ["a\0"]}, "command line: error: an argument cannot hold NUL"),
    ],
)
def test_bad_flags_without_a_file(
    flags: dict[str, object], line: str, tmp_path: Path
) -> None:
    arguments = {
        "command": ["a"],
        "count": 2,
        "environ": ENVIRON,
        "cwd": tmp_path,
    } | flags
    with pytest.raises(ConfigError) as caught:
        from_command(**arguments)  # type: ignore[arg-type] # one dict for all cases
    (reported,) = caught.value.lines()
    assert reported.startswith(line)


# All at once.


def test_every_problem_is_reported_in_one_pass_and_in_order(tmp_path: Path) -> None:
    content = (
        "name: a/b\n"
        "backend: slrum\n"
        "command: python x.py | tee log\n"
        "env: {TF_CONFIG: x, A: $HOME}\n"
        "tasks: {worker: 1, chief: 2}\n"
        "hosts: [a, a, '-x']\n"
        "hots: [b]\n"
        "grace: 5\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(
            write(tmp_path, content),
            overrides=["ports=1-2", "restart.max=-1"],
            environ=ENVIRON,
        )
    assert caught.value.exit_code == ExitCode.USAGE
    places = [
        line.removeprefix(f"{tmp_path}/").partition(": error: ")[0]
        for line in caught.value.lines()
    ]
    assert places == [
        "cluster.yaml:1:7",
        "cluster.yaml:2:10",
        "cluster.yaml:3:22",
        "cluster.yaml:4:7",
        "cluster.yaml:4:24",
        "cluster.yaml:5:27",
        "cluster.yaml:6:12",
        "cluster.yaml:6:15",
        "cluster.yaml:7:1",
        "cluster.yaml:8:8",
        "--set ports=1-2",
        "--set restart.max=-1",
    ]


def test_very_many_problems_are_cut(tmp_path: Path) -> None:
    content = SMALLEST + "hosts:\n" + "  - ';'\n" * 500
    reported = problems(tmp_path, content)
    assert len(reported) == 101
    assert reported[-1].message == "and 400 more problems"

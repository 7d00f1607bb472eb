"""Parsing of command lines."""

from __future__ import annotations

import pytest

from tfcluster.plan.compose import Program, parse

PY = ("/opt/venv/bin/python",)


@pytest.mark.parametrize(
    ("command", "options", "program"),
    [
        ("python train.py --epochs 3", (), ("train.py", "--epochs", "3")),
        ("python -u train.py -v", ("-u",), ("train.py", "-v")),
        ("python -OB -u t.py", ("-OB", "-u"), ("t.py",)),
        ("python -W error t.py", ("-W", "error"), ("t.py",)),
        ("python -Werror t.py", ("-W", "error"), ("t.py",)),
        (
            "python -uW error -m pkg.mod a",
            ("-u", "-W", "error"),
            ("-m", "pkg.mod", "a"),
        ),
        ("python -m pkg.mod -c x", (), ("-m", "pkg.mod", "-c", "x")),
        ("python -c pass a b", (), ("-c", "pass", "a", "b")),
        ("python -uc pass a", ("-u",), ("-c", "pass", "a")),
        ("python -cpass a", (), ("-c", "pass", "a")),
        ("python -X dev -- t.py", None, None),
        ("python", None, None),
        ("python -", None, None),
        ("python -c", None, None),
        ("python -W", None, None),
        ("python --version", None, None),
        ("python -Z t.py", None, None),
    ],
)
def test_python_commands(
    command: str, options: tuple[str, ...] | None, program: tuple[str, ...] | None
) -> None:
    words = command.split()
    parsed = parse(words, PY)
    assert parsed.argv == (*PY, *words[1:])
    assert parsed.python == PY
    assert parsed.arguments == (("run", *program) if program else ())
    assert parsed.options == (options or ())


def test_python3_is_the_same_word_as_python() -> None:
    assert parse(["python3", "-u", "a.py"], PY) == parse(["python", "-u", "a.py"], PY)
    assert parse(["python3", "a.py"], PY).argv == (*PY, "a.py")


def test_only_the_plain_word_means_the_configured_interpreter() -> None:
    assert parse(["python3.11", "a.py"], PY).python == ("python3.11",)
    assert parse(["/usr/bin/python", "a.py"], PY).python == ("/usr/bin/python",)


def test_other_commands_stay_as_they_are() -> None:
    assert parse(["bash", "-c", "python a.py"], PY) == Program(
        argv=("bash", "-c", "python a.py")
    )
    assert not parse(["pythonista", "a.py"], PY).arguments


def test_a_warm_interpreter_takes_only_programs_without_interpreter_options() -> None:
    assert parse(["python", "-u", "a.py"], PY).forkable
    assert not parse(["python", "-O", "a.py"], PY).forkable

"""Files with invalid or unsupported YAML, and files that cannot or must not be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.config.files import ENVIRON, SMALLEST, Bad, check_bad, problems, write
from tfcluster.base.errors import ConfigError
from tfcluster.config import load, parse

TASKS = "tasks: {worker: 2}\n"
BOMB = "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n"
    for i in range(8)
)

BAD = [
    Bad("", "1:1", "the file is empty (smallest valid config: "),
    Bad("# only\n# comments\n", "1:1", "the file is empty"),
    Bad("---\n", "1:1", "the file is empty"),
    Bad("- a\n- b\n", "1:1", "expected a mapping, found a list"),
    Bad("hello\n", "1:1", "expected a mapping, found hello"),
    Bad("tasks:\n\tworker: 1\n", "2:1", "tab used for indentation (use spaces)"),
    Bad("tasks:\n  worker: 1\n  \tps: 1\n", "3:3", "tab used for indentation"),
    Bad("hosts:\n  - a\n - b\n", "3:2", "'-' is indented differently from"),
    Bad(
        "hosts:\n - a\n- b\n",
        "3:1",
        "expected a key of the mapping begun at 1:1, found '-'",
    ),
    Bad("hosts: [a,\nports: auto\n", "1:8", "'[' is not closed by ']'"),
    Bad("tasks: {worker: 1\n", "1:8", "'{' is not closed by '}'"),
    Bad("hosts: [a b: c: d]\n", "1:15", "expected ',' or ']' in the sequence"),
    Bad(
        "hosts: [node[1-4], b]\n",
        "1:9",
        'node[1-4] has brackets, so it must be quoted here (write "node[1-4]")',
    ),
    Bad("hosts: [b, r[1-2]n[1-4]-ib]\n", "1:12", "r[1-2]n[1-4]-ib has brackets"),
    Bad("hosts: [gpu[1,3]]\n", "1:9", "gpu[1,3] has brackets"),
    Bad("hosts: [{host: node[01-04], slots: 2}]\n", "1:16", "node[01-04] has brackets"),
    Bad("hosts: ]\n", "1:8", "']' has no opening bracket"),
    Bad("tasks:\n  worker: 1\n ps: 1\n", "3:2", "this line is indented differently"),
    Bad("name: 'a\nbackend: b\n", "1:7", "the quote ' opened here is not closed"),
    Bad("name: 'it's'\n", "1:11", "text after the end of a value (a ' within"),
    Bad("name: a\nbackend\nports: b\n", "3:1", "there is a key without ':' before"),
    Bad("name: a\n  ports: b\n", "2:3", "this key is indented deeper"),
    Bad('name: "a\\qb"\n', "1:9", "unknown escape after '\\'"),
    Bad("command: python a.py: foo\n", "1:21", "a second ': ' in a value (quote"),
    Bad("command: {{ user }}\n", "1:11", "templates like '{{ x }}' are not"),
    Bad("command: @x\n", "1:10", "a value cannot start with '@' unquoted (quote"),
    Bad("command: `x`\n", "1:10", "a value cannot start with '`' unquoted"),
    Bad("command: *\n", "1:10", "a value cannot start with '*' unquoted"),
    Bad("command: %x\n", "1:10", "a value cannot start with '%' unquoted"),
    Bad(f"command: !!python/name:os.system x\n{TASKS}", "1:10", "YAML tags are not"),
    Bad(f"command: x\nenv: !env {{}}\n{TASKS}", "2:6", "YAML tags are not allowed"),
    Bad("command: *a\n", "1:10", "alias '*a' has no anchor '&a'"),
    Bad("hosts: &a [*a]\n", "1:12", "alias '*a' refers to itself"),
    Bad(f"a: &a [x]\n{BOMB}", "7:32", "aliases expand to more than"),
    Bad(
        "a: &a x\nhosts: [" + "*a, " * 1000 + "*a]\n",
        "2:4009",
        "too many aliases (limit 1000)",
    ),
    Bad("a: " + "[" * 200, "1:53", "nested deeper than 50"),
    Bad("name: a\x00b\n", "1:8", "control character U+0000"),
    Bad("name: a\n\x1b[31m\n", "2:1", "control character U+001B"),
    Bad(b"env: {A: caf\xe9}\n", "1:13", "byte 0xe9 is not UTF-8 (a Latin-1 file?"),
    Bad(b"# \xc3\xa9\n# \xc3\xa9 \xe9\n", "2:5", "byte 0xe9 is not UTF-8"),
    Bad("name: a\n".encode("utf-16"), "1:1", "is UTF-16 (save it as UTF-8)"),
    Bad(f'{TASKS}command: "a\\0b"\n', "2:10", "a value cannot hold U+0000"),
    Bad(f"{SMALLEST}---\nname: b\n", "3:1", "a second document; only one is allowed"),
    Bad(f"{SMALLEST}tasks: {{ps: 1}}\n", "3:1", "'tasks' already set at 2:1"),
    Bad("command: a\ntasks: {worker: 1, worker: 2}\n", "2:20", "'worker' already"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.words)
def test_bad_yaml(bad: Bad, tmp_path: Path) -> None:
    check_bad(bad, tmp_path)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.words)
def test_bad_yaml_without_libyaml(
    bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML's own parser has different messages; ours stay the same."""
    monkeypatch.setattr(parse, "_LOADER", yaml.SafeLoader)
    check_bad(bad, tmp_path)


def test_deeper_than_the_parser_itself_allows(tmp_path: Path) -> None:
    """Some versions of libyaml have a limit, which a look ahead reaches first."""
    (line,) = map(str, problems(tmp_path, "a: " + "[" * 2000))
    assert "error: nested deeper than 50" in line


# Files that cannot be read.


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "unreadable", "NUL"])
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("a\0b" if kind == "NUL" else "cluster.yaml")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.symlink_to(path)
    with pytest.raises(ConfigError) as caught:
        load(path, environ=ENVIRON)
    (problem,) = caught.value.problems
    assert problem.where == str(path).replace("\0", "\\x00")
    assert problem.message.startswith("cannot read: ")
    expected = {
        "missing": "No such file or directory",
        "folder": "Is a directory",
        "pipe": "is a pipe",
    }
    assert expected.get(kind, "") in problem.message


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    content = SMALLEST + "#" * (1 << 20)
    (problem,) = problems(tmp_path, content)
    assert problem.where == "cluster.yaml"
    assert problem.message == "larger than 1048576 bytes"


# Owners and permissions.


def test_a_file_that_others_can_write(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    path.chmod(0o666)
    with pytest.raises(ConfigError) as caught:
        load(path, environ=ENVIRON)
    (line,) = caught.value.lines()
    assert line == f"{path}: error: writable by others (0666) (chmod o-w {path})"
    path.chmod(0o664)
    load(path, environ=ENVIRON)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError) as caught:
        load(path, environ=ENVIRON)
    (problem,) = caught.value.problems
    assert problem.message == "belongs to another user (uid 12345)"


def test_no_escape_of_a_path_or_value_reaches_the_terminal(tmp_path: Path) -> None:
    path = write(
        tmp_path, f"{SMALLEST}workdir: '${{ESCAPE}}'\n", "a\x1b[31m\udc80.yaml"
    )
    with pytest.raises(ConfigError) as caught:
        load(path, environ={"ESCAPE": "/\x1b]0;x\a"})
    (line,) = caught.value.lines()
    assert line.isprintable()
    assert line == (
        f"{tmp_path}/a\\x1b[31m\\udc80.yaml:3:10: error: "
        "'/\\x1b]0;x\\x07' does not exist"
    )

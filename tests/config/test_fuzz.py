"""Any input quickly gives a description or a ConfigError, and never a traceback.

``TFCLUSTER_FUZZ_EXAMPLES`` sets how many examples each test tries.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.config.files import ENVIRON, SMALLEST, write
from tests.config.test_load import CONTRACT
from tfcluster.base.errors import ConfigError
from tfcluster.config import from_command, load, schema, starter
from tfcluster.schedulers import names

_fuzz = settings(
    max_examples=int(os.environ.get("TFCLUSTER_FUZZ_EXAMPLES", "50")),
    deadline=1000,
    suppress_health_check=[HealthCheck.too_slow],
)

VALID = [CONTRACT, SMALLEST, *map(starter, names())]

ODD = [
    *("\ud7fc", "'${\u200b'", "'$\u202e'", "'${\u202e}'", "'\u202e'", "/\u202e"),
    *("", "~", "null", "NO", "on", "off", "true", "0", "-1", "1", "010", "0x1f", "1_0"),
    *(
        "22:22",
        "1:00:00",
        "2.10",
        "1e-3",
        "1.0e+999",
        ".inf",
        ".nan",
        "9" * 30,
        "=",
        "<<",
    ),
    *(
        "2026-11-20",
        "!x",
        "*a",
        "&a b",
        "@x",
        "%",
        "|",
        ">",
        "- a",
        "? a",
        "{}",
        "[]",
        "[[]]",
    ),
    *(
        "{a: b}",
        "[a, 1, true, ~]",
        "'",
        '"',
        '"\\0"',
        '"\\ud800"',
        '"a\\nb"',
        "''",
        '""',
    ),
    *(
        "${A}",
        "${A:-b}",
        "${",
        "$",
        "$$",
        "$A",
        "~/x",
        "~",
        "/",
        "..",
        "/dev/null",
        "a b",
    ),
    *(
        "[::1]",
        "'[::1'",
        "'n[1-3]'",
        "'n[3-1]'",
        "'n[1-1000000000]'",
        "a:1",
        "-o",
        "a,b",
    ),
    *(
        "10s",
        "5 min",
        "40000-41000",
        "41000-40000",
        "1-2",
        "auto",
        "none",
        "collective",
    ),
    *(
        "python a.py | b",
        "a 'b",
        "x" * 300,
        "é",
        "\U0001f600",
        "\t",
        "#",
        "# a",
        ": ",
        "- ",
    ),
]


def _keys(shape: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """The dotted keys of a JSON schema: sections and the keys in them."""
    keys: list[str] = []
    for part in (shape, *shape.get("anyOf", [])):
        if "$ref" in part:
            part = definitions[part["$ref"].rpartition("/")[2]]
        for key, below in part.get("properties", {}).items():
            keys += [key, *(f"{key}.{rest}" for rest in _keys(below, definitions))]
    return keys


_SCHEMA = schema()
KEYS = [*_keys(_SCHEMA, _SCHEMA["$defs"]), "env.A", "secrets.A.file", "secrets.A.env"]

_scalars = st.one_of(
    st.sampled_from(ODD), st.text(max_size=12), st.from_regex(r"[-+.\d:eEx_]+")
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(st.sampled_from(KEYS) | _scalars, inner, max_size=4).map(
            lambda d: (
                "{" + ", ".join(f"{key}: {value}" for key, value in d.items()) + "}"
            )
        ),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def _try(folder: Path, content: bytes, overrides: Sequence[str] = ()) -> None:
    path = write(folder, content)
    try:
        load(path, overrides=overrides, environ=ENVIRON)
    except ConfigError as error:
        _check(error)


def _check(error: ConfigError) -> None:
    assert error.problems
    for line in error.lines():
        assert ": error: " in line or ": warning: " in line
        assert line.isprintable(), line
        assert len(line) < 1500


def test_there_is_a_key_for_every_section() -> None:
    assert {"tasks.worker.env", "hosts", "ssh.port", "runtime.strategy"} <= set(KEYS)


@_fuzz
@given(st.lists(st.tuples(st.sampled_from(KEYS), _values), min_size=1, max_size=6))
@example(pairs=[("slurm", "{\ud7fc}")])
def test_odd_values_in_every_key(folder: Path, pairs: list[tuple[str, str]]) -> None:
    lines = [SMALLEST]
    for key, value in pairs:
        *above, last = key.split(".")
        text = f"{last}: {value}"
        for name in reversed(above):
            text = f"{name}: {{{text}}}"
        lines.append(text)
    _try(folder, "\n".join(lines).encode("utf-8", "surrogatepass"))


@_fuzz
@given(st.lists(st.tuples(st.sampled_from(KEYS), _values), min_size=1, max_size=4))
def test_odd_values_in_overrides(folder: Path, pairs: list[tuple[str, str]]) -> None:
    overrides = [f"{key}={value}" for key, value in pairs]
    _try(folder, CONTRACT.encode(), overrides)


@_fuzz
@given(st.lists(st.text(max_size=20) | _values, max_size=4))
def test_any_overrides(folder: Path, overrides: list[str]) -> None:
    _try(folder, SMALLEST.encode(), overrides)


@_fuzz
@given(st.data())
def test_mutated_files(folder: Path, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(VALID)).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "repeat", "odd"]))
        length = data.draw(st.integers(1, 20))
        if kind == "set":
            content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=2))
        elif kind == "cut":
            del content[at : at + length]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=4))
        elif kind == "repeat":
            content[at:at] = content[at : at + length] * 3
        else:
            content[at:at] = data.draw(st.sampled_from(ODD)).encode()
    _try(folder, bytes(content))


@_fuzz
@given(st.text(alphabet="ab:- \n\t{}[],'\"&*!|>%@`#?0~$<", max_size=60))
def test_text_that_is_almost_yaml(folder: Path, content: str) -> None:
    _try(folder, content.encode())


@_fuzz
@given(st.binary(max_size=60))
def test_any_bytes(folder: Path, content: bytes) -> None:
    _try(folder, content)


@_fuzz
@given(
    st.lists(st.text(max_size=10), max_size=4),
    st.integers(-3, 10**20),
    st.text(alphabet="an1[]:,-. ", max_size=20) | st.none(),
    st.text(max_size=10) | st.none(),
)
def test_any_flags(
    folder: Path, command: list[str], count: int, hosts: str | None, name: str | None
) -> None:
    try:
        from_command(
            command, count=count, hosts=hosts, name=name, environ=ENVIRON, cwd=folder
        )
    except ConfigError as error:
        _check(error)


_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
_line = st.text(
    st.characters(exclude_categories=["C"], exclude_characters="$"),
    min_size=1,
    max_size=20,
)


@_fuzz
@given(
    st.lists(_line, min_size=1, max_size=5),
    st.dictionaries(_names.map("X{}".format), _line, max_size=4),
    st.integers(1, 9999),
)
def test_what_is_written_comes_back(
    folder: Path, command: list[str], env: dict[str, str], count: int
) -> None:
    """JSON is YAML: any text can be written as JSON and must be read back unchanged."""
    written = {"command": command, "env": env, "tasks": {"worker": {"count": count}}}
    path = write(folder, json.dumps(written, ensure_ascii=False))
    description = load(path, environ=ENVIRON).description
    assert list(description.command) == command
    assert description.env == env
    assert description.tasks["worker"].count == count

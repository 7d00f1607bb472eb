"""The schema, the starters and the reference agree with the loader."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.files import SMALLEST, loaded
from tests.config.test_load import CONTRACT
from tfcluster.base.errors import ConfigError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.config import schema, starter
from tfcluster.schedulers import names

ROOT = Path(PACKAGE_ROOT)
REFERENCE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", REFERENCE, re.MULTILINE | re.DOTALL)
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
SCHEMA = schema()

_TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


_KEYWORDS = {
    *(
        "$defs",
        "$id",
        "$ref",
        "$schema",
        "additionalProperties",
        "anyOf",
        "const",
        "default",
    ),
    *("description", "enum", "exclusiveMinimum", "items", "maximum", "minItems"),
    *("minLength", "minimum", "pattern", "patternProperties", "properties"),
    *("required", "title", "type"),
}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def violations(value: Any, shape: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Violations of the JSON Schema. Knows only the keywords that our schema uses."""
    unknown = set(shape) - _KEYWORDS
    assert not unknown, unknown
    if "$ref" in shape:
        yield from violations(value, SCHEMA["$defs"][shape["$ref"][8:]], path)
    choices = shape.get("anyOf", [])
    if choices and all(any(violations(value, entry, path)) for entry in choices):
        yield f"{path}: none of the choices"
    kinds = shape.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{path}: not {kinds}"
        return
    if "enum" in shape and value not in shape["enum"]:
        yield f"{path}: not in {shape['enum']}"
    if "const" in shape and value != shape["const"]:
        yield f"{path}: not {shape['const']}"
    if isinstance(value, str):
        if not re.search(shape.get("pattern", ""), value):
            yield f"{path}: does not match {shape['pattern']}"
        if len(value) < shape.get("minLength", 0):
            yield f"{path}: too short"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not shape.get("minimum", value) <= value <= shape.get("maximum", value):
            yield f"{path}: out of bounds"
        if "exclusiveMinimum" in shape and value <= shape["exclusiveMinimum"]:
            yield f"{path}: too small"
    if isinstance(value, list):
        if len(value) < shape.get("minItems", 0):
            yield f"{path}: too few"
        for index, item in enumerate(value):
            yield from violations(item, shape.get("items", {}), f"{path}[{index}]")
    if isinstance(value, dict):
        yield from _of_object(value, shape, path)


def _of_object(
    value: Mapping[str, Any], shape: Mapping[str, Any], path: str
) -> Iterator[str]:
    for key in shape.get("required", []):
        if key not in value:
            yield f"{path}: {key} is missing"
    for key, item in value.items():
        patterns = shape.get("patternProperties", {})
        matching = [entry for name, entry in patterns.items() if re.search(name, key)]
        if key in shape.get("properties", {}):
            matching.append(shape["properties"][key])
        if not matching:
            matching = [shape.get("additionalProperties", {})]
        for entry in matching:
            if entry is False:
                yield f"{path}.{key}: unknown"
            elif entry is not True:
                yield from violations(item, entry, f"{path}.{key}")


def _breaks(content: str) -> list[str]:
    return list(violations(yaml.safe_load(content), SCHEMA))


# The schema.


def test_the_schema_is_json_and_says_what_it_is() -> None:
    again = json.loads(json.dumps(SCHEMA))
    assert again == SCHEMA
    assert SCHEMA["$schema"].startswith("https://json-schema.org/")
    assert SCHEMA["$id"].endswith("/cluster.schema.json")
    assert SCHEMA["required"] == ["tasks"]
    assert "null" not in json.dumps(SCHEMA)


def _fields(
    shape: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, field in shape.get("properties", {}).items():
        yield f"{path}{key}", field


def test_every_key_has_a_description() -> None:
    shapes = {
        "": SCHEMA,
        **{f"{name}.": entry for name, entry in SCHEMA["$defs"].items()},
    }
    fields = [field for path, entry in shapes.items() for field in _fields(entry, path)]
    assert len(fields) > 60
    # A section has its description in its definition.
    described = {"description", "$ref"}
    assert [key for key, field in fields if described.isdisjoint(field)] == []
    assert all(entry["description"] for entry in SCHEMA["$defs"].values())


@pytest.mark.parametrize(
    "content", [CONTRACT, SMALLEST, *map(starter, names()), *BLOCKS]
)
def test_valid_files_fit_the_schema(content: str) -> None:
    data = {"tasks": {"worker": 1}} | yaml.safe_load(content)
    assert list(violations(data, SCHEMA)) == []


@pytest.mark.parametrize(
    "content",
    [
        "command: a\n",
        "tasks: {wroker: 1}\n",
        "tasks: {worker: 0}\n",
        "tasks: {worker: true}\n",
        "tasks: {worker: {count: 1.5}}\n",
        "tasks: {worker: 1}\nbackend: x\n",
        "tasks: {worker: 1}\ngrace: 5\n",
        "tasks: {worker: 1}\ncommand: []\n",
        "tasks: {worker: 1}\nname: a/b\n",
        "tasks: {worker: 1}\nruntime: {bucket_mb: 0}\n",
        "tasks: {worker: 1}\nhosts: [5]\n",
        "tasks: {worker: 1}\nrestart: ~\n",
        "tasks: {worker: 1}\nprogress_timeout: on\n",
        "- a\n",
    ],
)
def test_what_the_schema_refuses_the_loader_refuses(
    content: str, tmp_path: Path
) -> None:
    assert _breaks(content)
    with pytest.raises(ConfigError):
        loaded(tmp_path, f"{content}\n")


# Starters, and the files that are shipped with tfcluster.


@pytest.mark.parametrize("backend", names())
def test_starters_load_without_a_problem(backend: str, tmp_path: Path) -> None:
    result = loaded(tmp_path, starter(backend))
    assert result.warnings == ()
    assert result.description.backend == backend
    assert result.description.command == ("python", "train.py")


_COMMENTED = re.compile(r"^( *)# ([a-z_]+:.*(?:\n *#   .*)*)", re.MULTILINE)


def _each_put_in(text: str) -> Iterator[str]:
    """Copies of ``text``, each with one of its commented-out settings made active."""
    for match in _COMMENTED.finditer(text):
        indent, commented = match.groups()
        key = commented.partition(":")[0]
        live = re.sub(r"\n *# ", f"\n{indent}", commented)
        # The setting replaces an active one with the same key.
        others = (text[: match.start()], text[match.end() :])
        before, after = (
            re.sub(f"(?m)^{indent}{key}:.*$", "", entry) for entry in others
        )
        yield f"{before}{indent}{live}{after}"


@pytest.mark.parametrize("backend", names())
def test_what_starters_comment_out_loads_too(backend: str, tmp_path: Path) -> None:
    (tmp_path / "id").touch()
    variants = list(_each_put_in(starter(backend)))
    assert len(variants) >= 8
    for variant in variants:
        loaded(tmp_path, variant.replace("~/.ssh/id_ed25519", "id"))


def test_an_unknown_starter() -> None:
    with pytest.raises(ConfigError, match="it is not installed here"):
        starter("x")


def test_starters_are_at_most_88_columns_wide() -> None:
    for backend in names():
        assert max(map(len, starter(backend).splitlines())) <= 88


def test_shipped_files_fit_the_schema() -> None:
    broken = {path.name: _breaks(path.read_text(encoding="utf-8")) for path in SHIPPED}
    assert {name: mistakes for name, mistakes in broken.items() if mistakes} == {}


# docs/configuration.md


@pytest.mark.parametrize("block", BLOCKS)
def test_the_examples_of_the_reference_load(block: str, tmp_path: Path) -> None:
    tasks = "" if re.search("^tasks:", block, re.MULTILINE) else "tasks: {worker: 2}\n"
    loaded(tmp_path, block + tasks)


SECTIONS = {
    "Top level": SCHEMA,
    "Tasks": SCHEMA["$defs"]["TaskSection"],
    "Secrets": SCHEMA["$defs"]["SecretSource"],
    "Workdir": SCHEMA["$defs"]["Workdir"],
    "Runtime": SCHEMA["$defs"]["RuntimeSection"],
    "Trace": SCHEMA["$defs"]["Trace"],
    "Hosts": SCHEMA["$defs"]["HostItem"],
    "SSH": SCHEMA["$defs"]["SshSection"],
    "Slurm": SCHEMA["$defs"]["Slurm"],
    "Grid Engine": SCHEMA["$defs"]["Sge"],
    "PBS": SCHEMA["$defs"]["Pbs"],
    "LSF": SCHEMA["$defs"]["Lsf"],
    "Restart": SCHEMA["$defs"]["RestartSection"],
}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_reference_has_every_key_with_its_default(title: str) -> None:
    section = REFERENCE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = section.partition("| key |")[2].partition("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    documented = {row[1].strip(" `"): row[3].strip(" `") for row in rows}
    shape = SECTIONS[title]
    assert list(documented) == list(shape["properties"])
    for key, field in shape["properties"].items():
        default = field.get("default", "")
        text = default if isinstance(default, str) else json.dumps(default)
        if key in shape.get("required", []):
            text = "required"
        assert documented[key] == text, key


def test_the_reference_has_every_task_type() -> None:
    for kind in SCHEMA["$defs"]["TasksSection"]["properties"]:
        assert f"\n| `{kind}` |" in REFERENCE

"""The schemas of what commands print as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.kit.json_formats import assert_format, closed
from tfcluster import config, documents
from tfcluster.base.errors import ConfigError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.commands.schema import schema
from tfcluster.plan.model import Strategy
from tfcluster.record.replay import replay
from tfcluster.verify.compare import Comparison, Difference, Quantity
from tfcluster.verify.verdict import TrialFailure, Verdict, as_json
from tools.format_tables import table, with_tables

PAGE = (Path(PACKAGE_ROOT) / "docs" / "json.md").read_text(encoding="utf-8")
STATUS = replay({}, [{"type": "run", "t": 1.0, "run": "a", "name": "a"}]).to_json()


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """All parts of a schema that describe an object by its keys."""
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            yield node
        node = list(node.values())
    for item in node if isinstance(node, list) else ():
        yield from _objects(item)


@pytest.mark.parametrize("name", documents.FORMATS)
def test_a_schema_is_valid_open_and_documented(name: str) -> None:
    schema = documents.schema(name)
    Draft202012Validator.check_schema(schema)
    place = config.schema()["$id"].partition("/schema/")[0]
    assert schema["$id"] == f"{place}/schema/{FORMAT_VERSION}/{name}.schema.json"
    assert 'additionalProperties": false' not in json.dumps(schema)
    top = closed(name)
    assert top["properties"]["schema"]["const"] == FORMAT_VERSION
    assert "schema" in top["required"]
    for each in _objects(schema):
        assert set(each["required"]) <= set(each["properties"])
    assert f"<!-- keys of {name} -->" in PAGE


def test_the_page_names_no_other_format() -> None:
    named = re.findall(r"<!-- keys of ([\w-]+) -->", PAGE)
    assert set(named) == set(documents.FORMATS)


def test_a_key_that_the_schema_lacks_is_found() -> None:
    assert_format("status", STATUS)
    for changed in (
        {**STATUS, "news": 1},
        {**STATUS, "schema": 2},
        {**STATUS, "state": "happy"},
        {key: value for key, value in STATUS.items() if key != "tasks"},
        {**STATUS, "launcher": {"pid": 1, "host": "h", "news": 1}},
    ):
        with pytest.raises(AssertionError, match="the format status"):
            assert_format("status", changed)


def test_a_format_may_extend_another_one() -> None:
    assert_format("outcome", {**STATUS, "folder": "/x"})
    assert_format("status-all", {"schema": 1, "runs": [STATUS]})
    with pytest.raises(AssertionError, match="folder"):
        assert_format("outcome", STATUS)


def test_users_may_meet_further_keys() -> None:
    Draft202012Validator(documents.schema("status")).validate({**STATUS, "news": 1})


def test_verdicts_have_the_format() -> None:
    failed = TrialFailure("it crashed", ("a", "b"))
    verdict = Verdict(size=2, strategy=Strategy.COLLECTIVE, failed_alone=failed)
    assert_format("verify", as_json(verdict))
    first = Difference(
        step=3,
        kind="weight",
        name="dense/kernel",
        alone=0.5,
        ranks=math.nan,
        relative=math.nan,
    )
    comparison = Comparison(3, first, (Quantity("weight", 9, math.inf),))
    found = as_json(replace(verdict, comparison=comparison, first=first))
    assert_format("verify", found)
    assert found["first_difference"] is not None
    assert found["first_difference"]["ranks"] is None
    assert found["first_difference"]["alone"] == 0.5
    json.dumps(found, allow_nan=False)


def test_the_command_prints_every_schema() -> None:
    for name in documents.FORMATS:
        assert json.loads(schema(name)) == documents.schema(name)
    assert json.loads(schema("cluster")) == config.schema()
    with pytest.raises(ConfigError, match="no such schema"):
        schema("stat")


@pytest.mark.parametrize("name", documents.FORMATS)
def test_the_site_has_a_table_of_the_keys(name: str) -> None:
    rows = table(name)
    own = "| `folder` |" if name == "outcome" else "| `schema` | 1 | The version"
    assert any(row.startswith(own) for row in rows)
    assert all(row.count("|") == 4 for row in rows)


def test_tables_have_keys_within_keys_and_of_other_formats() -> None:
    kinds = {row.split("|")[1].strip(): row for row in table("status")}
    assert "`tasks[].serving.applied`" in kinds
    assert "integer or null" in kinds["`exit_code`"]
    assert any(
        row.startswith("| `runs[].state` | `starting`,") for row in table("list")
    )
    assert not any("runs[].tasks" in row for row in table("status-all"))
    shown = with_tables("# A\n\n<!-- keys of list -->\n")
    assert "| `runs[].folder` |" in shown

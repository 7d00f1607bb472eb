"""The types of ``Run.status`` are those of the published schema."""

from __future__ import annotations

from typing import Any

import pytest

from tfcluster import schemas
from tfcluster.api import documents

STATUS = schemas.read("status")
PARTS: dict[type, Any] = {
    documents.Status: STATUS,
    documents.Launcher: STATUS["properties"]["launcher"]["anyOf"][1],
    documents.Failure: STATUS["$defs"]["failure"],
    documents.Task: STATUS["$defs"]["task"],
    documents.Serving: STATUS["$defs"]["serving"],
    documents.Host: STATUS["$defs"]["host"],
    documents.Fit: STATUS["$defs"]["fit"],
    documents.Results: STATUS["$defs"]["results"],
    documents.File: STATUS["$defs"]["file"],
}


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_a_type_has_the_keys_of_its_schema(kind: type) -> None:
    assert list(kind.__annotations__) == list(PARTS[kind]["properties"])

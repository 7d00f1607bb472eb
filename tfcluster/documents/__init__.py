"""The JSON documents that commands print, as types, and their JSON Schemas.

A key's text for people stands beside its type: ``Annotated[int, "How many."]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcluster.documents import checks, run
from tfcluster.documents.json_schema import schema_of

FORMATS: Mapping[str, type] = {
    "doctor": checks.Diagnosis,
    "explain": checks.Explanation,
    "fetch": run.FetchReport,
    "list": run.RunList,
    "outcome": run.EndedStatus,
    "plan": checks.PlanDocument,
    "stacks": run.StackReport,
    "status": run.Status,
    "status-all": run.StatusOfAll,
    "verify": checks.Verification,
}
"""The documents by the names of their formats."""


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a format. Raises KeyError for an unknown format."""
    return schema_of(FORMATS[name], name)

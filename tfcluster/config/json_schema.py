"""The JSON Schema of cluster.yaml, for editors."""

from __future__ import annotations

from typing import Any

from tfcluster import __version__
from tfcluster.config.sections import cluster_model, known

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = f"https://tfcluster.example/schema/{__version__}/cluster.schema.json"


def schema() -> dict[str, Any]:
    """A schema that refuses unknown keys; loading checks what a schema cannot say."""
    tidy: dict[str, Any] = _tidy(cluster_model(known(())).model_json_schema())
    return {"$schema": _DIALECT, "$id": _ID, **tidy, "title": "cluster.yaml"}


def _tidy(node: Any) -> Any:
    """The schema without null (keys are left out instead) and generated titles."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {
        key: _tidy(item)
        for key, item in node.items()
        if not (key == "title" and isinstance(item, str))
        and not (key == "default" and item is None)
    }
    choices = tidy.get("anyOf")
    if isinstance(choices, list):
        choices = [choice for choice in choices if choice != {"type": "null"}]
        if len(choices) > 1:
            return {**tidy, "anyOf": choices}
        del tidy["anyOf"]
        return {**choices[0], **tidy}
    return tidy

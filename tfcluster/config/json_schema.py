"""The JSON Schema of cluster.yaml, for editors."""

from __future__ import annotations

from typing import Any

from tfcluster import __version__
from tfcluster.config.sections import cluster_model, known
from tfcluster.config.shape import section_json

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = f"https://tfcluster.example/schema/{__version__}/cluster.schema.json"


def schema() -> dict[str, Any]:
    """A schema that refuses unknown keys; loading checks what a schema cannot say."""
    shapes: dict[str, Any] = {}
    whole = section_json(cluster_model(known(())), shapes)
    head = {"$schema": _DIALECT, "$id": _ID, "title": "cluster.yaml"}
    return {**head, "$defs": shapes, **whole}

"""The command ``schema``: JSON Schemas of cluster.yaml and of what commands print."""

from __future__ import annotations

import json

from tfcluster import config, documents
from tfcluster.base.errors import ConfigError, Problem

CLUSTER = "cluster"


def names() -> list[str]:
    return [CLUSTER, *documents.FORMATS]


def schema(name: str) -> str:
    if name not in names():
        hint = f"there are {', '.join(names())}"
        raise ConfigError([Problem(name, "no such schema", hint)])
    document = config.schema() if name == CLUSTER else documents.schema(name)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

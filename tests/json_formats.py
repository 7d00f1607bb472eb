"""Holds JSON that tfcluster hands out to its published schemas.

The schemas allow keys that they do not name, since a later version may add some. Here
such a key is an error, so that nobody adds a key without adding it to the schema.
"""

from __future__ import annotations

import functools
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tfcluster import schemas


def assert_format(name: str, document: object) -> None:
    """Fail unless ``document`` has exactly the keys and types of the format."""
    found = [
        f"{error.json_path}: {error.message}"
        for error in _validator(name).iter_errors(document)
    ]
    assert not found, f"not as tfcluster/schemas/{name}.schema.json says: {found}"


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    registry: Registry[Any] = Registry()
    for each in schemas.names():
        resource = Resource.from_contents(closed(each))
        registry = registry.with_resource(resource.contents["$id"], resource)
    return Draft202012Validator(closed(name), registry=registry)


def closed(name: str) -> dict[str, Any]:
    """The schema, but without keys that it does not name."""
    found: dict[str, Any] = _closed(merged(name))
    return found


def merged(name: str) -> dict[str, Any]:
    """The schema with the keys of the formats that it extends."""
    found = schemas.read(name)
    for extended in found.pop("allOf", ()):
        below = merged(extended["$ref"].removesuffix(".schema.json"))
        found = {
            **below,
            **found,
            "required": [*below["required"], *found["required"]],
            "properties": {**below["properties"], **found["properties"]},
        }
    return found


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    below = {key: _closed(item) for key, item in node.items()}
    if isinstance(node.get("properties"), dict):
        below.setdefault("additionalProperties", False)
    return below

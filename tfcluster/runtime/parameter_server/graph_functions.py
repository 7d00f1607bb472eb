"""Makes the function names of a GraphDef unique.

TensorFlow registers functions by name for the whole process, and removes one as soon as
any graph with a function of that name is deleted. Tasks that trace the same code give
their functions the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def rename_functions(definition: Any, prefix: str) -> None:
    """Prefix the names of a GraphDef's functions and their references, in place."""
    library = definition.library
    names = {f.signature.name: prefix + f.signature.name for f in library.function}
    for function in library.function:
        function.signature.name = names[function.signature.name]
    for gradient in library.gradient:
        gradient.function_name = names.get(
            gradient.function_name, gradient.function_name
        )
        gradient.gradient_func = names.get(
            gradient.gradient_func, gradient.gradient_func
        )
    for node in nodes_of(definition):
        node.op = names.get(node.op, node.op)
        for attribute in node.attr.values():
            _rename_in(attribute, names)


def nodes_of(definition: Any) -> Iterator[Any]:
    """All nodes of a GraphDef and of its functions."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _rename_in(attribute: Any, names: Mapping[str, str]) -> None:
    kind = attribute.WhichOneof("value")
    if kind == "func":
        found = [attribute.func]
    elif kind == "list":
        found = list(attribute.list.func)
    else:
        return
    for function in found:
        function.name = names.get(function.name, function.name)
        for inner in function.attr.values():
            _rename_in(inner, names)

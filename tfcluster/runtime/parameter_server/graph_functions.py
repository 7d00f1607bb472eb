"""Makes the function names of a GraphDef unique.

TensorFlow registers functions by name for the whole process, and removes one as soon as
any graph with a function of that name is deleted. Tasks that trace the same code give
their functions the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from tfcluster.runtime.tensor_types import Message


class AttrValue(Protocol):
    """An ``AttrValue``: an attribute of a node as a protocol buffer."""

    @property
    def func(self) -> Any: ...

    @property
    def list(self) -> Any: ...

    def WhichOneof(self, group: str) -> str | None: ...


def rename_functions(definition: Message, prefix: str) -> None:
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


def nodes_of(definition: Message) -> Iterator[Message]:
    """All nodes of a GraphDef and of its functions."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _rename_in(attribute: AttrValue, names: Mapping[str, str]) -> None:
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

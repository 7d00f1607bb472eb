"""Batches that a loop takes one after the other, whose size is known only when it runs.

The body of such a loop (``steps_per_execution``, ``for _ in tf.range(n): next(batches)``)
is split where it takes a batch. The rest becomes two branches: one for batches of the
size that was seen first, which can be divided, and one for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfcluster.runtime.partition.functions import Function, Input, SourceNode

TAKES = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")


@dataclass(frozen=True, slots=True)
class SplitFunction:
    """A function in two parts, of which the first takes a batch."""

    first: Function
    """It has the outputs that ``rest`` needs in addition to the arguments."""
    rest: Function
    """Its arguments are those of the whole function, then the outputs of ``first``."""


def split(function: Function) -> SplitFunction | None:
    """Split a function where it takes its first batch; None if it takes none."""
    taking = next(
        (n for n, each in function.nodes.items() if each.definition.op in TAKES), None
    )
    if taking is None:
        return None
    before = _ancestors(function.nodes, taking)
    after = {n: each for n, each in function.nodes.items() if n not in before}
    needed = [
        each
        for source in after.values()
        for each in source.inputs
        if each.node in before
    ]
    needed += [each for each in function.outputs if each.node in before]
    crossing = {each: f"taken_{i}" for i, each in enumerate(dict.fromkeys(needed))}

    def renamed(inputs: Sequence[Input]) -> tuple[Input, ...]:
        return tuple(
            Input(crossing[each], 0) if each in crossing else each for each in inputs
        )

    rest = {
        name: replace(
            each,
            inputs=renamed(each.inputs),
            controls=tuple(c for c in each.controls if c not in before),
        )
        for name, each in after.items()
    }
    return SplitFunction(
        replace(
            function,
            nodes={n: each for n, each in function.nodes.items() if n in before},
            outputs=tuple(crossing),
            must_run=tuple(n for n in function.must_run if n in before) or (taking,),
        ),
        replace(
            function,
            arguments=(*function.arguments, *crossing.values()),
            nodes=rest,
            outputs=renamed(function.outputs),
            must_run=tuple(n for n in function.must_run if n not in before),
        ),
    )


def _ancestors(nodes: Mapping[str, SourceNode], name: str) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        source = nodes[todo.pop()]
        for each in (*(i.node for i in source.inputs), *source.controls):
            if each in nodes and each not in found:
                found.add(each)
                todo.append(each)
    return found

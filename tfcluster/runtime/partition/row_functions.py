"""Functions of whole batches, for the rows of one rank: they need no rows of others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import ExchangeRequest
from tfcluster.runtime.partition.input_functions import MapFunction, Undivided
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    Placement,
    Ranks,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.partition.propagate import propagate
from tfcluster.runtime.partition.rewrite import rewrite
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.tensor_types import Tensor


class RowFunction:
    """Gets a rank's rows of a batch of full size, and returns those of the results."""

    def __init__(
        self, definition: Any, captured: Sequence[Tensor], specs: Sequence[Any]
    ) -> None:
        self._name: str = definition.signature.name
        self._captured = captured
        self._specs = specs
        """Those of the rank's results."""
        tf_functions.register(definition)
        weakref.finalize(self, tf_functions.forget, self._name)

    def __call__(self, *own: Tensor) -> list[Tensor]:
        """The results, in a function of ``tf.data``."""
        graph = tf.compat.v1.get_default_graph()
        results = tf.raw_ops.PartitionedCall(
            args=[*own, *map(graph.capture, self._captured)],
            Tout=[spec.dtype for spec in self._specs],
            f=self._name,
        )
        for result, spec in zip(results, self._specs, strict=True):
            result.set_shape(spec.shape)
        return list(results)

    def nothing(self) -> list[Tensor]:
        """Results without rows, of the same types."""
        return [
            tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)
            for spec in self._specs
        ]


class _NoExchange:
    """See ``exchange.Exchanger``."""

    bucket_bytes = 0
    scatters = False
    words = ()

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        raise Undivided("the rows that it returns depend on others")


def row_function(
    function: MapFunction, shapes: Sequence[Shape], split: Split
) -> tuple[RowFunction, list[Shape]]:
    """A function for a rank's rows of batches of these shapes, and the results' shapes.

    All have the rows in their first dimension. Raises Undivided if the function is not
    divided so.
    """
    try:
        return _row_function(function, shapes, split)
    except Exception as error:
        # Whatever it is: all ranks can call the function itself.
        raise Undivided(
            f"it maps whole batches, and the function of map() is not divided: {error}"
        ) from error


def _row_function(
    function: MapFunction, shapes: Sequence[Shape], split: Split
) -> tuple[RowFunction, list[Shape]]:
    concrete, rows = function.concrete, shapes[0][0]
    assert rows is not None
    own, captured = concrete.inputs[: len(shapes)], concrete.captured_inputs
    arguments = [
        Argument(tensor.dtype, shape) for tensor, shape in zip(own, shapes, strict=True)
    ]
    arguments += map(Argument.of, captured)
    placements: list[Placement] = [Shard(0, rows)] * len(own)
    placements += [REPLICATE] * len(captured)
    placed = propagate(specialise(function.definition, arguments), placements, rows)
    if any(placement != Shard(0, rows) for placement in placed.outputs):
        raise Undivided("not all that it returns is divided by rows")
    written = rewrite(
        placed,
        tf_functions.unique_name("tfcluster_own_rows"),
        Ranks(split.size, (split.rank,)),
        _NoExchange(),
        Draws(lambda: 0),
        [tf_functions.handle_data(tensor) for tensor in (*own, *captured)],
        placements,
        visible=0,
    )
    results = [(rows, *(value.shape or ())[1:]) for value in placed.graph.outputs]
    specs = [
        tf.TensorSpec([None, *shape[1:]], value.dtype)
        for shape, value in zip(results, placed.graph.outputs, strict=True)
    ]
    return RowFunction(written.definitions[0], captured, specs), results

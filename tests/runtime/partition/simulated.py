"""Runs functions divided among simulated ranks in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.functions import parsed
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Ranks
from tfcluster.runtime.partition.propagate import propagate
from tfcluster.runtime.partition.rewrite import Written, rewrite
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise

MORE = int(os.environ.get("TFCLUSTER_PARTITION_EXAMPLES", "1"))
"""How many times as many examples there are as in each run of all tests."""
SIZES = (1, 2, 3, 5)
"""The numbers of ranks that tests simulate."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Divided:
    """What ranks computed, beside what the whole function computed."""

    placed: Placed
    written: Written
    whole: list[Array]
    found: list[Array]

    @property
    def outputs(self) -> list[Placement]:
        """The placements of the outputs, before they are made whole."""
        return self.placed.outputs

    @property
    def computed_whole(self) -> list[str]:
        """The types of nodes with divided inputs that no rule divides."""
        return sorted({node.type for node in self.placed.whole})

    def assert_equal(self, tolerance: float = 0.0) -> None:
        """Exactly, or up to a part of the largest value where sums are reordered.

        NaN equals NaN, and 0.0 equals -0.0.
        """
        assert len(self.found) == len(self.whole)
        for found, whole in zip(self.found, self.whole, strict=True):
            assert found.dtype == whole.dtype
            assert found.shape == whole.shape
            if whole.dtype.kind not in "fcV":
                np.testing.assert_array_equal(found, whole)
                continue
            wide = whole.astype(complex if whole.dtype.kind == "c" else float)
            finite = wide[np.isfinite(wide)]
            largest = np.abs(finite).max() if finite.size else 0.0
            np.testing.assert_allclose(
                found.astype(wide.dtype), wide, rtol=0, atol=tolerance * largest
            )


def divide(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    placements: Sequence[Placement],
    size: int,
    rows: int | None = None,
    compare: bool = True,
) -> Divided:
    """Run ``function`` on ``size`` ranks with these placements of its arguments.

    ``rows`` are the batch's rows. Arguments become tensors; the results must be
    tensors of numbers, in any nest. Unless ``compare``, the whole function is not run.
    """
    tensors = [tf.convert_to_tensor(each) for each in arguments]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in tensors]
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    definition = traced.function_def
    inputs = [*tensors, *traced.captured_inputs]
    graph = specialise(parsed(definition), [Argument.of(each) for each in inputs])
    given = [*placements, *[REPLICATE] * (len(inputs) - len(placements))]
    placed = propagate(graph, given, rows)
    ranks = Ranks(size, tuple(range(size)))
    draws = Draws(iter(range(1, 1000)).__next__)
    written = rewrite(placed, "divided", ranks, None, draws)
    tf_functions.register(written.definitions[0])
    count = len(tf.nest.flatten(traced.structured_outputs))
    whole = tf.nest.flatten(traced(*tensors)) if compare else []
    found = tf_functions.call(written.name, inputs, count)
    return Divided(
        placed,
        written,
        [np.asarray(each.numpy()) for each in whole],
        [np.asarray(each.numpy()) for each in found],
    )

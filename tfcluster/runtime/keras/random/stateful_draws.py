"""Makes stateful random ops, too, draw the numbers for a rank's own rows.

These are ``tf.random.normal``, ``tf.nn.dropout`` and the like, and
``tf.random.Generator``. Their state advances by the numbers of the whole batch, as on
one machine. (See ``drawn_rows``.)

An op in a graph has a state of its own, which begins anew when a ``tf.function`` is
traced again. Ranks trace a step more often than one machine: in a custom training loop
for batches of other sizes, and a custom step of ``fit`` for a trial. So there the
runtime keeps the state instead. The op is a
counter of Philox (``GuardedPhiloxRandom`` in TensorFlow), so a stateless op that gets
this counter draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras.random.drawn_rows import DrawnRows, Part
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.tensor_types import (
    DType,
    Graph,
    ShapeLike,
    Tensor,
    Variable,
)

_RESERVED = 256
"""Number of blocks of random bits by which an op advances its state per number."""
_PHILOX = 1
"""The stateless ops' id of the Philox generator."""


class StatefulDraws:
    """The hooks on TensorFlow's stateful random ops."""

    def __init__(self, session: Session, rows: DrawnRows) -> None:
        self._session = session
        self._rows = rows
        self._drawn: dict[Hashable, Variable] = {}
        """For each op, how many numbers it has drawn."""

    def install(self) -> None:
        """Install the hooks in TensorFlow, once per process."""
        tf_patches.TABLE.install(
            {
                tf_patches.STATEFUL_NORMAL: self._normal,
                tf_patches.STATEFUL_UNIFORM: self._uniform,
                tf_patches.STATEFUL_TRUNCATED_NORMAL: self._truncated_normal,
                tf_patches.STATEFUL_UNIFORM_INT: self._uniform_int,
                **dict.fromkeys(tf_patches.DRAWS_PER_PARAMETER, self._per_parameter),
                tf_patches.GENERATOR_SKIP: self._generator,
            }
        )

    # --- ops --------------------------------------------------------------------------

    def _normal(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        dtype: DType,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        part = self._rows.part(shape, may_be_noise=True)
        if part is None:
            return original(shape, dtype, seed, seed2, name)
        if (state := self._state("normal", part, seed, seed2)) is None:
            return _of_whole(part, original, dtype, seed, seed2, name)
        return part.skip_to(_draw_normal, *state, _PHILOX, dtype)

    def _uniform(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        dtype: DType,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        part = self._rows.part(shape)
        if part is None:
            return original(shape, dtype, seed, seed2, name)
        if (state := self._state("uniform", part, seed, seed2)) is None:
            return _of_whole(part, original, dtype, seed, seed2, name)
        return part.skip_to(_draw_uniform, *state, _PHILOX, dtype)

    def _truncated_normal(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        dtype: DType,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        part = self._rows.part(shape)
        if part is None:
            return original(shape, dtype, seed, seed2, name)
        if (state := self._state("truncated normal", part, seed, seed2)) is None:
            return _of_whole(part, original, dtype, seed, seed2, name)

        def draw(shape: Tensor) -> Tensor:
            key, counter = state
            return tf.raw_ops.StatelessTruncatedNormalV2(
                shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=dtype
            )

        return part.slice_of(draw)

    def _uniform_int(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        minval: Tensor,
        maxval: Tensor,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        part = self._rows.part(shape)
        if part is None:
            return original(shape, minval, maxval, seed, seed2, name)
        if (state := self._state("integers", part, seed, seed2)) is None:
            return _of_whole(part, original, minval, maxval, seed, seed2, name)

        def draw(shape: Tensor) -> Tensor:
            key, counter = state
            return tf.raw_ops.StatelessRandomUniformIntV2(
                shape=shape,
                key=key,
                counter=counter,
                alg=_PHILOX,
                minval=minval,
                maxval=maxval,
            )

        return part.slice_of(draw)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _per_parameter(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        parameter: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Draw ``shape`` numbers for each entry of ``parameter``."""
        if parameter.shape.rank == 0:
            part = self._rows.part(shape)
            return (
                original(shape, parameter, *args, **kwargs)
                if part is None
                else _of_whole(part, original, parameter, *args, **kwargs)
            )
        part = self._rows.part(tf.shape(parameter))
        if part is None:
            return original(shape, parameter, *args, **kwargs)
        each = tf.size(shape, out_type=tf.int32)
        whole = original(shape, part.of_whole(parameter), *args, **kwargs)
        first = tf.range(each, tf.rank(whole))
        # The entries of the parameter come last.
        order = tf.concat([first, tf.range(each)], 0)
        own = part.own(tf.transpose(whole, order))
        count = tf.size(first)
        drawn: Tensor = tf.transpose(
            own, tf.concat([tf.range(count, tf.rank(own)), tf.range(count)], 0)
        )
        return drawn

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _generator(
        self, original: Callable[..., Tensor], generator: Any, shape: ShapeLike
    ) -> Tensor:
        """Advance a ``tf.random.Generator`` as on one machine."""
        part = self._rows.part(shape)
        if part is not None:
            shape = part.shape(part.whole)
        return original(generator, shape)

    # --- states -----------------------------------------------------------------------

    def _state(
        self, kind: str, part: Part, seed: int, seed2: int
    ) -> tuple[Tensor, Tensor] | None:
        """The key and the counter (uint64) for stateless ops; advances the state.

        None if the op keeps its state, as on one machine. ``seed`` and ``seed2`` are
        those of the op.
        """
        if tf.executing_eagerly() or seed == seed2 == 0:
            return None  # There is no trace, or TensorFlow chooses a seed.
        graph = _program_graph()
        step: Hashable
        if self._session.share is not None:
            # It is traced once for batches of all sizes.
            if (step := self._session.retraced_step) is None:
                return None
        elif self._session.loop.in_pass:
            step = self._batch_size(graph)
        else:
            return None  # No batch of a loop is computed: nothing is traced too often.
        key = (graph.name, kind, seed, seed2, step)
        if key not in self._drawn:
            self._drawn[key] = new_variable(0, tf.int64)
        drawn = self._drawn[key]
        before = drawn.read_value()
        count = tf.reduce_prod(tf.cast(part.shape(part.whole), tf.int64))
        with tf.control_dependencies([before]):
            drawn.assign_add(count)
        block = tf.cast(before * _RESERVED, tf.uint64)
        return (
            tf.constant([_as_uint64(seed)], tf.uint64),
            tf.stack([block, tf.constant(_as_uint64(seed2), tf.uint64)]),
        )

    def _batch_size(self, graph: Graph) -> float | None:
        """The rows of the whole batch, if the graph is for batches of that size.

        As on one machine, a graph for batches of another size has another state.
        """
        rows = next(
            (
                op.outputs[0].shape[0]
                for op in graph.get_operations()
                if op.type == "Placeholder" and op.outputs[0].shape.rank
            ),
            None,
        )
        loop = self._session.loop
        present = loop.present_rows()
        if rows is None or present is None:
            return rows
        # A rank without rows computes one that does not count.
        return float(rows * loop.share.total / max(present, 1))


def _of_whole(
    part: Part, original: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Draw for the whole batch, which advances the state as on one machine."""
    return part.own(original(part.shape(part.whole), *args, **kwargs))


def _draw_normal(
    shape: Tensor,
    key: Tensor,
    counter: Tensor,
    alg: int | Tensor,
    dtype: DType,
    name: str | None,
) -> Tensor:
    return tf.raw_ops.StatelessRandomNormalV2(
        shape=shape, key=key, counter=counter, alg=alg, dtype=dtype, name=name
    )


def _draw_uniform(
    shape: Tensor,
    key: Tensor,
    counter: Tensor,
    alg: int | Tensor,
    dtype: DType,
    name: str | None,
) -> Tensor:
    return tf.raw_ops.StatelessRandomUniformV2(
        shape=shape, key=key, counter=counter, alg=alg, dtype=dtype, name=name
    )


def _program_graph() -> Graph:
    """The graph of the outermost ``tf.function`` that is being traced."""
    graph: Graph = tf.compat.v1.get_default_graph()
    while getattr(graph.outer_graph, "building_function", False):
        graph = graph.outer_graph
    return graph


def _as_uint64(seed: int) -> int:
    return int(seed) % (1 << 64)

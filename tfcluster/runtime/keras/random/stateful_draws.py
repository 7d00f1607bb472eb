"""Makes stateful random ops draw the numbers for a rank's own rows, too.

These are ``tf.random.normal``, ``tf.nn.dropout`` and the like,
``tf.random.Generator``, and the classes that ``tf.nn.nce_loss`` samples. Their state
advances by the numbers of the whole batch, as on one machine. (See ``drawn_rows``.)

An op in a graph has its own state, which starts from the beginning when a
``tf.function`` is traced again. Ranks trace a step more often than one machine: in a
custom training loop for batches of other sizes, and in a custom step of ``fit`` for a
trial. So in these cases the runtime keeps the state instead. The op is a counter of
Philox (``GuardedPhiloxRandom`` in TensorFlow), so a stateless op that gets this counter
draws the same numbers. If there is no such op, see ``persistent_op``.

An op is recognised in another trace by the calls of functions around it, and by its
number among the ops of its function with the same seeds. A function that creates
variables is traced twice in one call, and TensorFlow discards the first trace.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.keras.inner_functions import InnerFunctions
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.random.drawn_rows import (
    ALIKE,
    DrawnRows,
    Part,
    rows_of_graph,
)
from tfcluster.runtime.keras.random.persistent_op import PersistentOp
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

    def __init__(
        self, session: Session, rows: DrawnRows, functions: InnerFunctions
    ) -> None:
        self._session = session
        self._rows = rows
        self._functions = functions
        self._drawn: dict[Hashable, Variable] = {}
        """The count of numbers that each op has drawn."""
        self._earlier: weakref.WeakKeyDictionary[Graph, Counter[Hashable]] = (
            weakref.WeakKeyDictionary()
        )
        """The count of ops with the same seeds in each function's graph so far."""
        self._kept: dict[Hashable, PersistentOp] = {}
        """The ops that keep their states themselves."""

    def install(self) -> None:
        """Install the hooks in TensorFlow, once per process."""
        tf_patches.TABLE.install(
            {
                tf_patches.STATEFUL_NORMAL: self._normal,
                tf_patches.STATEFUL_UNIFORM: self._uniform,
                tf_patches.STATEFUL_TRUNCATED_NORMAL: self._truncated_normal,
                tf_patches.STATEFUL_UNIFORM_INT: self._uniform_int,
                tf_patches.STATEFUL_GAMMA: self._gamma,
                tf_patches.STATEFUL_POISSON: self._poisson,
                tf_patches.STATEFUL_CATEGORICAL: self._categorical,
                tf_patches.GENERATOR_SKIP: self._generator,
                tf_patches.UNIFORM_CLASSES: self._uniform_classes,
                tf_patches.LOG_UNIFORM_CLASSES: self._log_uniform_classes,
                tf_patches.FIXED_CLASSES: self._fixed_classes,
                tf_patches.LEARNED_CLASSES: self._learned_classes,
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
        return self._numbers(
            ("normal", seed, seed2),
            shape,
            lambda sizes: original(sizes, dtype, seed, seed2, name),
            partial(tf.raw_ops.StatelessRandomNormalV2, alg=_PHILOX, dtype=dtype),
            skips=dtype,
            may_be_noise=True,
        )

    def _uniform(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        dtype: DType,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        return self._numbers(
            ("uniform", seed, seed2),
            shape,
            lambda sizes: original(sizes, dtype, seed, seed2, name),
            partial(tf.raw_ops.StatelessRandomUniformV2, alg=_PHILOX, dtype=dtype),
            skips=dtype,
        )

    def _truncated_normal(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        dtype: DType,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        return self._numbers(
            ("truncated normal", seed, seed2),
            shape,
            lambda sizes: original(sizes, dtype, seed, seed2, name),
            partial(tf.raw_ops.StatelessTruncatedNormalV2, alg=_PHILOX, dtype=dtype),
        )

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
        return self._numbers(
            ("integers", seed, seed2),
            shape,
            lambda sizes: original(sizes, minval, maxval, seed, seed2, name),
            partial(
                tf.raw_ops.StatelessRandomUniformIntV2,
                alg=_PHILOX,
                minval=minval,
                maxval=maxval,
            ),
        )

    def _numbers(
        self,
        op: tuple[str, int, int],
        shape: ShapeLike,
        plain: Callable[[ShapeLike], Tensor],
        stateless: Callable[..., Tensor],
        *,
        skips: DType | None = None,
        may_be_noise: bool = False,
    ) -> Tensor:
        """Draw numbers of ``shape``, or this rank's rows of one machine's numbers.

        ``op`` is the kind and the two seeds of the program's op. ``plain(sizes)`` calls
        it, and ``stateless(shape=, key=, counter=)`` draws the same numbers from a
        state. ``skips`` is true if the op draws a fixed number of bits for each number
        of this dtype. For ``may_be_noise`` see ``DrawnRows.part``.
        """
        self._look_around()
        part = self._rows.part(shape, may_be_noise=may_be_noise)
        state = self._state(part, shape, *op)
        if state is None:
            if part is None:
                return plain(shape)
            return part.own(plain(part.shape(part.whole)))
        key, counter = state
        if part is None:
            return stateless(shape=shape, key=key, counter=counter)
        if skips is not None:
            return part.skip_to(stateless, key, counter, skips)
        return part.slice_of(lambda s: stateless(shape=s, key=key, counter=counter))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _gamma(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        alpha: Tensor,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
    ) -> Tensor:
        def draw(shape: Tensor, alpha: Tensor) -> Tensor:
            op = self._op("gamma", seed, seed2)
            if op is None:
                return original(shape, alpha, seed, seed2, name)
            sizes = tf.concat([shape, tf.shape(alpha)], 0)
            key, counter = self._advanced(op, sizes, seed, seed2)
            return tf.raw_ops.StatelessRandomGammaV3(
                shape=sizes, key=key, counter=counter, alg=_PHILOX, alpha=alpha
            )

        return self._per_parameter(draw, shape, alpha)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _poisson(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        rate: Tensor,
        seed: int = 0,
        seed2: int = 0,
        dtype: DType = tf.int64,
        name: str | None = None,
    ) -> Tensor:
        def plain(shape: Tensor, rate: Tensor) -> Tensor:
            return original(shape, rate, seed, seed2, dtype, name)

        def draw(shape: Tensor, rate: Tensor) -> Tensor:
            op = self._op("poisson", seed, seed2)
            if op is None:
                return plain(shape, rate)
            found = self._persistent_op(op, plain, dtype)(shape, rate)
            found.set_shape(
                tf.TensorShape([None] * shape.shape[0]).concatenate(rate.shape)
            )
            return found

        return self._per_parameter(draw, shape, rate)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _categorical(
        self,
        original: Callable[..., Tensor],
        logits: Tensor,
        num_samples: Tensor | int,
        seed: int = 0,
        seed2: int = 0,
        output_dtype: DType = tf.int64,
        name: str | None = None,
    ) -> Tensor:
        def plain(logits: Tensor, samples: Tensor) -> Tensor:
            return original(logits, samples, seed, seed2, output_dtype, name)

        self._look_around()
        logits, samples = map(tf.convert_to_tensor, (logits, num_samples))
        # In a step for batches of any size, a fixed number is not a number of rows.
        fixed = logits.shape[:1]
        shape = fixed if fixed.is_fully_defined() else tf.shape(logits)[:1]
        part = self._rows.part(shape)
        whole = logits if part is None else part.of_whole(logits)
        op = self._op("categorical", seed, seed2)
        if op is None:
            found = plain(whole, samples)
        else:
            found = self._persistent_op(op, plain, output_dtype)(whole, samples)
            found.set_shape([whole.shape[0], tf.get_static_value(samples)])
        return found if part is None else part.own(found)

    def _per_parameter(
        self,
        draw: Callable[[Tensor, Tensor], Tensor],
        shape: ShapeLike,
        parameter: Tensor,
    ) -> Tensor:
        """Draw ``shape`` numbers for each entry of ``parameter``.

        ``draw`` gets both, for the whole batch; its result has shape ``(*shape,
        *parameter.shape)``.
        """
        self._look_around()
        sizes = tf.convert_to_tensor(shape, tf.int32)
        if parameter.shape.rank == 0:
            part = self._rows.part(sizes)
            if part is None:
                return draw(sizes, parameter)
            return part.own(draw(part.shape(part.whole), parameter))
        part = self._rows.part(tf.shape(parameter))
        if part is None:
            return draw(sizes, parameter)
        each = tf.size(sizes, out_type=tf.int32)
        whole = draw(sizes, part.of_whole(parameter))
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
        self._look_around()
        part = self._rows.part(shape)
        if part is not None:
            shape = part.shape(part.whole)
        return original(generator, shape)

    # --- classes for losses that sample them ------------------------------------------

    def _uniform_classes(
        self, original: Callable[..., Any], true_classes: Tensor, *args: Any, **kw: Any
    ) -> Any:
        return self._classes("uniform classes", original, true_classes, *args, **kw)

    def _log_uniform_classes(
        self, original: Callable[..., Any], true_classes: Tensor, *args: Any, **kw: Any
    ) -> Any:
        return self._classes("log-uniform classes", original, true_classes, *args, **kw)

    def _fixed_classes(
        self, original: Callable[..., Any], true_classes: Tensor, *args: Any, **kw: Any
    ) -> Any:
        return self._classes("fixed classes", original, true_classes, *args, **kw)

    def _learned_classes(
        self, original: Callable[..., Any], true_classes: Tensor, *args: Any, **kw: Any
    ) -> Any:
        """Sample classes by how often they occurred in the batches so far."""
        if self._rows.divides():
            self._session.differs(
                f"{user_line()}: tf.random.learned_unigram_candidate_sampler counts "
                "the classes of a batch. Each rank counts the classes of its own rows, "
                "so it samples other classes than one machine. Use another sampler of "
                "tf.random"
            )
        return self._classes("learned classes", original, true_classes, *args, **kw)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _classes(
        self,
        kind: str,
        original: Callable[..., Any],
        true_classes: Tensor,
        *args: Any,
        seed: int = 0,
        seed2: int = 0,
        name: str | None = None,
        **settings: Any,
    ) -> Any:
        """A candidate sampler's results: classes, and two arrays of expected counts.

        Classes do not depend on the batch, so all ranks sample the same classes. One of
        the arrays has the shape of ``true_classes``, the classes of this rank's rows:
        int64, of shape (rows, number per row). ``args`` and ``settings`` are numbers
        and strings.
        """
        settings |= {"seed": seed, "seed2": seed2}

        def plain(classes: Tensor) -> Any:
            return original(classes, *args, name=name, **settings)

        self._look_around()
        # Two samplers may have the same seeds but different settings.
        op = self._op(f"{kind} {args} {settings}", seed, seed2)
        if op is None:
            return plain(true_classes)
        classes = tf.convert_to_tensor(true_classes, tf.int64)
        dtypes = tf.int64, tf.float32, tf.float32
        sampled, expected, of_sampled = self._persistent_op(op, plain, dtypes)(classes)
        expected.set_shape(classes.shape)
        for each in (sampled, of_sampled):
            each.set_shape([args[1]])
        return sampled, expected, of_sampled

    def _look_around(self) -> None:
        """Raise CollectiveError in a step that is computed shard by shard.

        The state would advance once for each shard of a rank. In a loop that may run
        over rows, warn.
        """
        self._rows.warn_in_row_loop()
        if self._session.current_shard is not None:
            self._session.refuse(
                "the step draws random numbers from a state that TensorFlow keeps "
                "(tf.random.normal, tf.nn.dropout, tf.random.Generator, "
                "tf.nn.nce_loss). With runtime.shards it would advance once for each "
                "shard of a rank. Use keras.random, the layers of Keras, or "
                "tf.random.stateless_*"
            )

    # --- states -----------------------------------------------------------------------

    def _state(
        self, part: Part | None, shape: ShapeLike, kind: str, seed: int, seed2: int
    ) -> tuple[Tensor, Tensor] | None:
        """The key and the counter (uint64) for stateless ops; advances the state.

        Returns None if the op keeps its state, as on one machine. ``part`` is this
        rank's part of an array of this ``shape``; None if all ranks draw the same
        array. ``seed`` and ``seed2`` are the seeds of the op.
        """
        op = self._op(kind, seed, seed2)
        if op is None:
            return None
        whole = shape if part is None else part.shape(part.whole)
        sizes = tf.convert_to_tensor(whole, tf.int32 if part is None else None)
        return self._advanced(op, sizes, seed, seed2)

    def _op(self, kind: str, seed: int, seed2: int) -> Hashable:
        """Identifies an op across all traces; None if TensorFlow keeps its state."""
        if tf.executing_eagerly() or seed == seed2 == 0:
            return None  # There is no trace, or TensorFlow chooses a seed.
        if self._session.within(ALIKE):
            return None  # The function of a dataset is not traced again.
        graph = tf_internals.outermost_graph()
        step: Hashable
        if self._session.share is not None:
            # The step is traced once for batches of all sizes.
            if (step := self._session.retraced_step) is None:
                return None
        elif self._session.loop.in_pass:
            step = self._batch_size(graph)
        else:
            return None  # Outside of loops over batches, nothing is traced too often.
        self._functions.keep_states()
        op = graph.name, self._functions.place, kind, seed, seed2, step
        # Of several ops with the same seeds (``seed=1``), each has its own state.
        earlier = self._earlier.setdefault(tf_internals.function_graph(), Counter())
        earlier[op] += 1
        return *op, earlier[op]

    def _advanced(
        self, op: Hashable, sizes: Tensor, seed: int, seed2: int
    ) -> tuple[Tensor, Tensor]:
        """The state of ``op`` before it draws an array of these sizes; advances it."""
        if op not in self._drawn:
            self._drawn[op] = new_variable(0, tf.int64)
        drawn = self._drawn[op]
        before = drawn.read_value()
        count = tf.reduce_prod(tf.cast(sizes, tf.int64))
        with tf.control_dependencies([before]):
            drawn.assign_add(count)
        block = tf.cast(before * _RESERVED, tf.uint64)
        return (
            tf.constant([_as_uint64(seed)], tf.uint64),
            tf.stack([block, tf.constant(_as_uint64(seed2), tf.uint64)]),
        )

    def _persistent_op(
        self, op: Hashable, draw: Callable[..., Any], dtypes: Any
    ) -> PersistentOp:
        if op not in self._kept:
            self._kept[op] = PersistentOp(draw, dtypes)
        return self._kept[op]

    def _batch_size(self, graph: Graph) -> float | None:
        """The rows of the whole batch, if the graph is for batches of that size.

        As on one machine, a graph for batches of another size has another state.
        """
        rows = rows_of_graph(graph)
        loop = self._session.loop
        present, total = loop.present_rows(), loop.share.total
        if rows is None or present is None or total is None:
            return rows
        # A rank without rows computes one row, which does not count.
        return float(rows * total / max(present, 1))


def _as_uint64(seed: int) -> int:
    return int(seed) % (1 << 64)

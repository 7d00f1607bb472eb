"""All-reduce gradients by collective ops of the step's graph.

Neither Python nor the host's memory is involved: see ``graph_steps``. The ops are, in
this order on all ranks: a small all-gather of every rank's number of rows and the
digest of its signature, on CPUs; all-gathers of the slices' indices; one all-reduce for
each bucket of gradients (with compression, an all-to-all and an all-gather), beginning
with the last variables, whose gradients a backward pass computes first; and all-gathers
of the slices' values. The exchange of a bucket begins when its gradients are computed,
so all but the last overlap with the backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.buckets import Item, by_size
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.transports.tensorflow import graph
from tfcluster.runtime.collective.transports.tensorflow.graph import GraphCollectives
from tfcluster.runtime.exchange.tensor_list import TensorList
from tfcluster.runtime.exchange.wire_format import (
    WireTensor,
    uncompressed,
    widened,
)
from tfcluster.runtime.keras.checks.divergence_check import Look, Watch
from tfcluster.runtime.keras.graph_order import refuse_xla
from tfcluster.runtime.keras.graph_steps import GraphSteps, Place
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import Session, Share
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.train.allreduce_step import Target, words_of
from tfcluster.runtime.keras.train.common_indices import may_be_common
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.process_group import context
from tfcluster.runtime.tensor_types import (
    Array,
    DType,
    Gradient,
    Graph,
    Shape,
    Tensor,
)
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import as_tensor

_WIDE = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
}
"""The dtypes in which gradients are summed, by the gradients' dtypes."""
_HALVES = {"fp16": tf.float16, "bf16": tf.bfloat16}
"""The dtypes in which gradients are sent, by ``runtime.compression``."""
_MOST_CODES = (1 << 63) - 1
_ITERATES = ("IteratorGetNext", "OptionalGetValue")
"""The beginnings of the types of ops that take elements of datasets."""
_DIGESTS = 2
"""The number of 64-bit integers in the digest of a signature."""


def is_possible(
    session: Session, gradients: Sequence[Gradient], state: Sequence[Variable]
) -> bool:
    """Whether these gradients can be exchanged by ops of the graph being traced.

    In eager steps they cannot. If they cannot in a function, says once why.
    """
    steps = session.graph_steps
    if steps is None or not tf.inside_function():
        return False
    why = _obstacle(session, steps, gradients, state)
    if why:
        session.warn(
            f"the function at {user_line()} exchanges its gradients through Python and "
            f"host memory, as with transport: host: {why}"
        )
    return not why


def _obstacle(
    session: Session,
    steps: GraphSteps,
    gradients: Sequence[Gradient],
    state: Sequence[Variable],
) -> str:
    """Why a function cannot exchange its gradients by ops; empty if it can."""
    dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
    dtypes += [tf.as_dtype(variable.dtype) for variable in state]
    for dtype in dtypes:
        if dtype not in _WIDE:
            return f"TensorFlow's collective ops do not support {dtype.name}"
    if session.share is not None:
        return ""
    if session.graph_loop_share is None or not steps.is_called():
        return "it is traced before it is called (get_concrete_function)"
    if _takes_batches():
        return "it takes its batches from a dataset by itself"
    return ""


def _takes_batches() -> bool:
    """Whether the graph being traced, or one around it, takes elements of datasets.

    In that case Python divides the batches, so between two exchanges it has to see that
    the first exchange has taken place.
    """
    graph: Graph | None = tf.compat.v1.get_default_graph()
    while graph is not None and getattr(graph, "building_function", False):
        if any(op.type.startswith(_ITERATES) for op in graph.get_operations()):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def exchange(
    session: Session,
    steps: GraphSteps,
    target: Target,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    state: Sequence[Variable],
    watch: Watch | None = None,
    *,
    chiefs_count: bool = False,
) -> list[Gradient]:
    """Average gradients and ``state`` over the ranks, by rows.

    Arguments, result and errors are as for ``gradient_allreduce.exchange``; errors are
    raised when the function returns. ``watch`` compares the ranks after some of the
    steps.
    """
    refuse_xla()
    words = words_of(gradients, variables, state)
    tensors = TensorList.of([*gradients, *map(tf.convert_to_tensor, state)])
    step = _Step(session, steps, target, words, watch, chiefs_count=chiefs_count)
    with tf.name_scope(graph.SCOPE):
        found = step.exchanged(tensors, tensors.dense_count - len(state))
        averaged = tensors.with_flat(found).tensors()
        for variable, mean in zip(state, averaged[len(gradients) :], strict=True):
            # Not with Keras's assign, which looks like an assignment by the program.
            raw(variable).assign(as_tensor(mean))
    return averaged[: len(gradients)]


class _Kept:
    """The values that a graph keeps for Python; all traces of one place share them."""

    def __init__(self) -> None:
        self.rows = graph.real()
        """This rank's rows of the last step."""
        self.gradients: dict[str, TfVariable] = {}
        """This rank's gradients of the last trial, packed, by dtype."""
        self._trials = graph.counter()
        self._judged = 0

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Add ops that keep the gradients of a trial."""
        for dtype in dict.fromkeys(_wide(tensor.dtype) for tensor in tensors):
            chosen = [t for t in tensors if _wide(t.dtype) is dtype]
            kept = self.gradients.setdefault(dtype.name, graph.vector(dtype))
            with tf.device("CPU:0"):
                flat = [tf.reshape(tf.cast(t, dtype), [-1]) for t in chosen]
                graph.assign(kept, tf.concat(flat, 0))
        graph.increment(self._trials)

    def take(self) -> list[Array]:
        """The gradients of the last trial; empty if there was no new trial."""
        trials = int(self._trials.numpy())
        if trials == self._judged:
            return []
        self._judged = trials
        found: list[Array] = [kept.numpy() for kept in self.gradients.values()]
        for kept in self.gradients.values():
            kept.assign(tf.zeros([0], kept.dtype))
        return found


@dataclass(frozen=True, slots=True)
class _Context:
    """The data that the ranks send each other before an exchange."""

    share: Tensor
    """This rank's fraction of all rows: a scalar of dtype float64, 0..1."""
    shares: Tensor
    """The fractions of all ranks, in TensorFlow's order."""
    rows: Tensor
    """This rank's number of rows: a scalar of dtype float64."""
    times: Tensor
    """How often this rank's slices count: a scalar of dtype float64."""
    order: Tensor
    """For each rank, the position of its data in TensorFlow's gathered result; int32.
    """


class _Step:
    """The exchange in one trace."""

    def __init__(
        self,
        session: Session,
        steps: GraphSteps,
        target: Target,
        words: tuple[str, ...],
        watch: Watch | None,
        *,
        chiefs_count: bool,
    ) -> None:
        self._session = session
        self._target = target
        self._words = words
        self._watch = watch
        self._chiefs_count = chiefs_count
        self._bucket_bytes = session.bucket_bytes
        self._half: DType | None = _HALVES.get(context().options.compression)
        self._ops: GraphCollectives = steps.collectives
        self._objects = tf.convert_to_tensor(steps.objects)
        digest = self._digest()
        self._numbers = [
            int.from_bytes(digest[8 * i : 8 * i + 8], "big", signed=True)
            for i in range(_DIGESTS)
        ]
        again = steps.occurrence(digest)
        self._key = ("gradients", digest.hex(), again)
        self._in_loop = session.share is None
        key = (target.step, digest, chiefs_count, again, self._in_loop)
        self._kept: _Kept = steps.kept(key, _Kept)
        self._place: Place = steps.place(
            key,
            self._signature,
            self._after,
            in_loop=self._in_loop,
            explain=self._explain,
        )

    def exchanged(self, tensors: TensorList, gradients: int) -> list[Tensor]:
        """The averages, in the order of ``tensors.flat``.

        The first ``gradients`` of the dense tensors are gradients, and the others are
        layers' variables. Slices are gathered, or added up if their indices are common.
        """
        wires = self._wire_tensors(tensors, gradients)
        flat = tensors.flat
        own = [*flat[:gradients], *flat[tensors.dense_count : tensors.summed_count]]
        # In a loop, only the gradients are certain to come after the batch, and the
        # gradients of the last variables come first.
        ready = flat[gradients - 1] if gradients else own[0]
        share = self._share(ready)
        told = self._told(share, ready)
        self._keep_trial(share, flat[:gradients], own[gradients:])
        rows = [
            self._gathered_rows(told, number, indices, common=may_be_common(indices))
            for number, indices in enumerate(tensors.indices)
        ]
        dense = wires[: tensors.dense_count]
        # A backward pass computes the gradients of the last variables first.
        order = [*reversed(range(gradients)), *range(gradients, len(dense))]
        rounded = [i < gradients and self._is_rounded(dense[i].tensor) for i in order]
        means = self._reduced(told, [dense[i].tensor for i in order], rounded)
        by_place = dict(zip(order, means, strict=True))
        found = [wire.restored(by_place[i]) for i, wire in enumerate(dense)]
        sparse = zip(wires[len(dense) :], rows, strict=True)
        values = [
            self._gathered_values(told, number, wire, each)
            for number, (wire, each) in enumerate(sparse)
        ]
        result = [*found, *values, *(each.indices for each in rows)]
        with tf.control_dependencies(result):
            graph.increment(self._place.passed)
        return result

    def _wire_tensors(self, tensors: TensorList, gradients: int) -> list[WireTensor]:
        flat = tensors.flat
        return [
            *map(uncompressed, flat[: tensors.dense_count]),
            *map(widened, flat[tensors.dense_count : tensors.summed_count]),
        ]

    # --- what the ranks send each other -----------------------------------------------

    def _share(self, ready: Tensor) -> Share:
        """This rank's share of the step, with numbers or scalars."""
        if self._session.share is not None:
            return self._session.share
        assert self._session.graph_loop_share is not None
        with tf.control_dependencies([ready]), tf.device("CPU:0"):
            return self._session.graph_loop_share()

    def _keep_trial(
        self, share: Share, dense: Sequence[Tensor], sparse: Sequence[Tensor]
    ) -> None:
        """Keep this rank's gradients if the step is a trial; see ``_after``."""
        if not self._session.trials or self._chiefs_count or share.trial is False:
            return

        def keep() -> Tensor:
            # Repeated rows also repeat the slices' indices, so judge their sums.
            self._kept.keep([*dense, *(tf.reduce_sum(each, 0) for each in sparse)])
            return tf.constant(0)

        if share.trial is True:
            keep()
        else:
            tf.cond(share.trial, keep, lambda: tf.constant(0))

    def _told(self, share: Share, ready: Tensor) -> _Context:
        """Compare the ranks' signatures, and compute their shares.

        The key and the shape are the same for all gradients, so that even ranks that
        exchange different gradients meet here.
        """
        size = self._ops.size
        with tf.device("CPU:0"):
            rows = self._weight(share)
            mine = tf.stack(
                [
                    tf.constant(self._ops.rank, tf.int64),
                    tf.bitcast(rows, tf.int64),
                    self._objects,
                    _code(self._watch.settings() if self._watch else []),
                    *(tf.constant(number, tf.int64) for number in self._numbers),
                ]
            )
            # Not before the batch and the forward pass have succeeded: the program may
            # catch their errors.
            said = self._ops.contexts.all_gather(
                mine, ["gradients of all ranks"], ready if self._in_loop else None
            )
            table = tf.reshape(said, [size, 4 + _DIGESTS])
            same = tf.reduce_all(tf.equal(table[:, 4:], mine[4:]))
            same = same & _agree(table[:, 3]) & tf.reduce_all(table[:, 2] == 0)
            unlike = tf.cast(tf.logical_not(same), tf.int64)
            counted = graph.increment(self._place.unlike, unlike)
            with tf.control_dependencies([counted]):
                checked = tf.debugging.Assert(same, ["the ranks differ"])
            with tf.control_dependencies([checked]):
                weights = tf.bitcast(table[:, 1], tf.float64)
            fraction = tf.math.divide_no_nan(rows, tf.reduce_sum(weights))
            graph.assign(self._kept.rows, rows)
            order = tf.argsort(table[:, 0])
            shares = tf.math.divide_no_nan(weights, tf.reduce_sum(weights))
            return _Context(fraction, shares, rows, self._times(share), order)

    def _weight(self, share: Share) -> Tensor:
        if self._chiefs_count:
            return tf.constant(float(self._session.chief), tf.float64)
        return tf.identity(tf.cast(share.rows, tf.float64))

    def _times(self, share: Share) -> Tensor:
        """How often this rank's slices count; float64.

        If all ranks have the same slices, only the chief's count, as often as there are
        ranks: see ``allreduce_step``.
        """
        once = tf.constant(1.0, tf.float64)
        session = self._session
        if not (self._in_loop and session.divides) or self._chiefs_count:
            return once
        chiefs = float(session.size) if session.chief else 0.0
        return tf.where(share.undivided, tf.constant(chiefs, tf.float64), once)

    # --- dense gradients --------------------------------------------------------------

    def _is_rounded(self, tensor: Tensor) -> bool:
        """Whether a gradient is sent in two bytes, and sums of it are rounded."""
        return self._half is not None and tensor.dtype.size > self._half.size

    def _reduced(
        self, told: _Context, tensors: Sequence[Tensor], rounded: Sequence[bool]
    ) -> list[Tensor]:
        """The averages of tensors, in the same order; some are rounded."""
        items = [
            Item(f"{_wide(t.dtype).name}{' rounded' * is_rounded}", _nbytes(t))
            for t, is_rounded in zip(tensors, rounded, strict=True)
        ]
        found: dict[int, Tensor] = {}
        for number, bucket in enumerate(by_size(items, self._bucket_bytes)):
            chosen = [tensors[i] for i in bucket]
            half = self._half if rounded[bucket[0]] else None
            means = self._bucket(told, chosen, ("bucket", number), half)
            found |= zip(bucket, means, strict=True)
        return [found[i] for i in range(len(tensors))]

    def _bucket(
        self,
        told: _Context,
        tensors: Sequence[Tensor],
        words: tuple[object, ...],
        half: DType | None,
    ) -> list[Tensor]:
        """The averages of tensors that are summed in one dtype and sent as ``half``."""
        devices = self._ops.buckets.devices
        dtype = _wide(tensors[0].dtype) if half is None else tf.float32
        with tf.device(devices.own):
            flat = [tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors]
            packed = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
            if packed.shape.num_elements() == 0:
                return list(tensors)
            words = (*self._key, *words)
            # 0 times NaN is 0 here: a rank without rows contributes nothing.
            if half is None:
                part = tf.math.multiply_no_nan(packed, tf.cast(told.share, dtype))
                total = self._ops.buckets.all_reduce(part, words, packed)
            else:
                shares = tf.cast(told.shares, dtype)
                place = told.order[self._ops.rank]
                total = self._ops.buckets.rounded_sum(
                    packed, shares, place, half, words
                )
            sizes = [_size(each) for each in flat]
            means = [total] if len(flat) == 1 else tf.split(total, sizes)
            return [
                tf.cast(tf.reshape(mean, _shape(tensor)), tensor.dtype)
                for mean, tensor in zip(means, tensors, strict=True)
            ]

    # --- sparse gradients -------------------------------------------------------------

    def _gathered_rows(
        self, told: _Context, number: int, indices: Tensor, *, common: bool
    ) -> _Rows:
        """The indices of all ranks' rows; a rank without weight has none.

        ``common``: whether they may be common, see ``common_indices``. Ranks whose
        graphs differ in this exchange the same messages.
        """
        with tf.device("CPU:0"):
            own = tf.shape(indices, out_type=tf.int64)[:1]
            counts = told.share * told.times > 0
            own = tf.where(counts, own, tf.zeros_like(own))
            own_word = tf.constant(common) & ~_repeat_by_rows(indices, told.rows)
            mine = tf.concat([own, [tf.cast(own_word, tf.int64)]], 0)
            words = (*self._key, "counts", number)
            said = self._ops.contexts.all_gather(mine, words)
            table = tf.gather(tf.reshape(said, [self._ops.size, 2]), told.order)
            counts = table[:, 0]
            rows = _Rows(own[0], counts, told.order, indices, own_word)
            words = (*self._key, "indices", number)
            gathered = self._ops.contexts.all_gather(
                rows.padded(indices), words, rows=rows.most
            )
            agreed = tf.reduce_all((table[:, 1] > 0) | (counts == 0))
            rows = replace(rows, common=agreed & rows.are_common(gathered))
            return replace(rows, indices=rows.combined(gathered, _first_of))

    def _gathered_values(
        self, told: _Context, number: int, wire: WireTensor, rows: _Rows
    ) -> Tensor:
        """The values of all ranks' rows, scaled so that their sum is the average."""
        values = wire.tensor
        with tf.device(self._ops.buckets.devices.own):
            part = values * tf.cast(told.share * told.times, values.dtype)
            words = (*self._key, "values", number)
            gathered = self._ops.buckets.all_gather(
                rows.padded(part), words, values, rows=rows.most
            )
            found = rows.combined(gathered, _sum_of)
        return wire.restored(found)

    # --- outside of the graph ---------------------------------------------------------

    def _digest(self) -> bytes:
        """The digest of what all ranks know about this exchange while they trace it."""
        target = self._target
        # Some ranks may learn the name of an optimizer earlier than others.
        known = target.step if target.name() == target.step else ""
        options = f"{self._bucket_bytes} {context().options.compression}"
        what = f"{known} {options} {self._chiefs_count}"
        digest = Signature(what, self._words).digest
        return hashlib.sha256(digest).digest()[: 8 * _DIGESTS]

    def _signature(self) -> Signature:
        return Signature(f"gradients of {self._target.name()}", self._words)

    def _explain(self) -> None:
        """Compare hyperparameters. Raises CollectiveError on all ranks if they differ.

        Called if the ranks have equal signatures but differ otherwise.
        """
        if self._watch is not None:
            self._compare(self._watch.look_at_settings())

    def _compare(self, look: Look) -> None:
        signature = Signature(f"digests of what {self._target.name()} trains")
        allgather_bytes(self._session.group, b"", signature, look)

    def _after(self, steps: int) -> None:
        """Count steps, and compare the ranks after some of them."""
        if self._chiefs_count:
            return
        session, target = self._session, self._target
        name = target.name()
        session.last_rows = float(self._kept.rows.numpy())
        judged, tried = False, self._kept.take()
        if tried and session.trials is not None:
            judged = session.trials.judge(name, tried)
        for number in range(steps):
            session.applied(
                name,
                in_loop=self._in_loop,
                judged=judged and number == steps - 1,
                step=target.step,
            )
        target.names.add(name)
        if judged:
            session.loop.unjudged -= target.names
        look = self._watch.passed(steps) if self._watch else None
        if look is not None:
            self._compare(look)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a sparse gradient on all ranks."""

    own: Tensor
    """The number of this rank's rows that count: a scalar of dtype int64."""
    counts: Tensor
    """The number of rows of each rank, in rank order; int64."""
    order: Tensor
    """See ``_Context.order``."""
    indices: Tensor
    """The indices of all ranks' rows, in rank order, or the common ones."""
    common: Tensor
    """Whether the ranks' slices are added up instead of concatenated: a scalar."""

    @property
    def most(self) -> Tensor:
        """The number of rows to which each rank pads its own rows; int64.

        At least one, because TensorFlow does not gather empty tensors.
        """
        return graph.rounded_up(tf.maximum(tf.reduce_max(self.counts), 1))

    def padded(self, tensor: Tensor) -> Tensor:
        """The first ``own`` rows of ``tensor``, padded with zeros to ``most`` rows."""
        missing = [[0, self.most - self.own]]
        others = [[0, 0]] * (len(tensor.shape) - 1)
        return tf.pad(tensor[: self.own], tf.stack([*missing, *others]))

    def are_common(self, gathered: Tensor) -> Tensor:
        """Like ``sparse.are_common``, of all ranks' padded indices: a scalar."""
        own = self.counts > 0
        counts = tf.boolean_mask(self.counts, own)
        parts = tf.boolean_mask(self._parts(gathered), own)
        equal = tf.reduce_all(counts == counts[:1]) & tf.reduce_all(parts == parts[:1])
        return equal & (tf.size(counts) > 1)

    def combined(
        self, gathered: Tensor, of_common: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The rows of all ranks without padding, in rank order.

        If their indices are common, ``of_common`` of all ranks' rows, of shape (ranks,
        most, ...), and of their counts, also without padding.
        """
        parts = self._parts(gathered)

        def added() -> Tensor:
            return of_common(parts, self.counts)[: tf.reduce_max(self.counts)]

        def concatenated() -> Tensor:
            return tf.boolean_mask(parts, tf.sequence_mask(self.counts, self.most))

        found = tf.cond(self.common, added, concatenated)
        found.set_shape([None, *gathered.shape[1:]])
        return found

    def _parts(self, gathered: Tensor) -> Tensor:
        """The padded rows of each rank: shape (ranks, most, ...), in rank order."""
        size = self.order.shape[0]
        row = tf.shape(gathered, tf.int64)[1:]
        parts = tf.reshape(gathered, tf.concat([[size, self.most], row], 0))
        return tf.gather(parts, self.order)


def _first_of(parts: Tensor, counts: Tensor) -> Tensor:
    """The rows of a rank that has the most."""
    return parts[tf.argmax(counts)]


def _sum_of(parts: Tensor, _: Tensor) -> Tensor:
    """The sum over the ranks, in their order."""
    return tf.add_n(tf.unstack(parts))


def _repeat_by_rows(indices: Tensor, rows: Tensor) -> Tensor:
    """Like ``sparse.repeat_by_rows``: a scalar."""
    count, rows = tf.size(indices, tf.int64), tf.cast(rows, tf.int64)
    period = count // tf.maximum(rows, 1)
    repeats = tf.reduce_all(indices[period:] == indices[: count - period])
    return (rows > 1) & (period > 0) & (period * rows == count) & repeats


def _code(settings: Sequence[Tensor]) -> Tensor:
    """A number computed from six digits of each hyperparameter; int64.

    Returns 0 if there are none. Like ``rank_divergence.text_of``, but without Python.
    """
    if not settings:
        return tf.constant(0, tf.int64)
    texts = [
        tf.strings.as_string(tf.cast(each, tf.float64), precision=5, scientific=True)
        if each.dtype.is_floating
        else tf.strings.as_string(each)
        for each in settings
    ]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(texts, " "), _MOST_CODES)


def _agree(codes: Tensor) -> Tensor:
    """Whether all ranks that have hyperparameters have the same ones."""
    known = tf.not_equal(codes, 0)
    most = tf.reduce_max(codes)  # Codes are not negative.
    return tf.reduce_all(tf.logical_or(tf.equal(codes, most), tf.logical_not(known)))


def _wide(dtype: DType) -> DType:
    return _WIDE[dtype]


def _nbytes(tensor: Tensor) -> int | None:
    elements: int | None = tensor.shape.num_elements()
    return None if elements is None else elements * _wide(tensor.dtype).size


def _size(flat: Tensor) -> int | Tensor:
    return tf.size(flat) if flat.shape[0] is None else flat.shape[0]


def _shape(tensor: Tensor) -> Shape | Tensor:
    known = tensor.shape.is_fully_defined()
    found: Shape | Tensor = tensor.shape if known else tf.shape(tensor)
    return found

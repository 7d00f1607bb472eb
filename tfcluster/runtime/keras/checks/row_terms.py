"""Finds losses in custom steps and loops that are not a sum over the rows of a batch.

A mean over the rows, like a sum, consists of one term for each row. So if A and B are
the halves of a batch, ``L(A, B) + L(B, A)`` equals ``L(A, A) + L(B, B)`` up to
rounding. That is not true for a mean over the entries of a mask, a Dice loss or a
contrastive loss: the losses of the ranks' rows do not determine the loss of all rows.

That equation also holds for a loss that treats the first half of a batch differently
from the second half. So without random numbers, which belong to positions in the batch,
``L(A, B)`` and ``L(B, A)`` must be equal, too.

A number of the batch that passes ``tf.stop_gradient`` may be right in the value of a
loss and wrong in its gradient, as in ``a + stop_gradient(a / b) * b``. If that number
scales a term that has a gradient, the difference between ``L(A, A)`` and ``L(A, B)``
changes with the number.

The first equation also finds numbers that a program only reports, in metrics or logs,
and that are neither a mean nor a sum over the rows: for example, a precision for which
the program itself divides two counts. These cause a warning.

The loss is recomputed for the other arrangements of rows without running the user's
code: see ``op_replay``. Random numbers and the batch statistics of
``BatchNormalization`` keep their values. The method is tfcluster's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.batches.batch_slicing import has_dense_rows, has_rows
from tfcluster.runtime.keras.checks.check_steps import RareSteps
from tfcluster.runtime.keras.checks.op_replay import (
    Holds,
    Op,
    Recording,
    addends,
    detached_numbers,
    key_of,
    ops_of,
    path_between,
    recorded,
    replay,
    uses_draws,
)
from tfcluster.runtime.keras.checks.rounding import TOLERANCES
from tfcluster.runtime.keras.checks.types import TensorKey
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import OF_A_CHECK, Session
from tfcluster.runtime.tensor_types import Leaf, Nest, Tensor

_Order: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the number of rows of one half to the positions of the rows of both halves."""

_MOST_RECORDED = 100_000
"""The most operations per step: a loop left in mid-step must not record forever."""


class _Check:
    """One place in a graph where a loss is checked."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """Describes a loss, or another number, that is about to be judged."""

    what: str
    """The beginning of messages about the number."""
    tolerance: float
    """Relative."""
    may_have_places: bool
    """Whether the number may depend on the position of a row in the batch."""
    detached: Sequence[Tensor] = ()
    """Numbers of the batch without gradient on which the loss depends."""
    is_reported: bool = False
    """Whether the number is only reported, in metrics or logs, and does not affect the
    training."""

    @classmethod
    def of(
        cls,
        paths: Sequence[Sequence[Op]],
        ops: Sequence[Op],
        leaves: Sequence[Tensor],
    ) -> _Loss:
        """The loss that a line of the program differentiates.

        ``paths`` compute it; they are among ``ops``, all operations of the step.
        ``leaves`` are the batch's tensors.
        """
        draws = any(uses_draws(ops, path) for path in paths)
        what = f"{user_line()}: this loss"
        rows = leaves[0].shape[0]
        detached = [each for path in paths for each in detached_numbers(path, rows)]
        unique = tuple({key_of(each): each for each in detached}.values())
        return cls(what, _tolerance(paths), may_have_places=draws, detached=unique)


_Describe: TypeAlias = Callable[
    [Sequence[Sequence[Op]], Sequence[Op], Sequence[Tensor]], _Loss | None
]
"""Describes a number as ``_Loss.of`` does. Returns None if it cannot be judged."""


def _described(what: str, *, is_reported: bool = False) -> _Describe:
    """Describe numbers other than losses; messages about them begin with ``what``."""

    def describe(
        paths: Sequence[Sequence[Op]], _: Sequence[Op], leaves: Sequence[Tensor]
    ) -> _Loss | None:
        if _read_variables(paths):
            return None  # They may have changed since the number was computed.
        return _Loss(
            what, _tolerance(paths), may_have_places=True, is_reported=is_reported
        )

    return describe


class RowTerms:
    """The hook on ``GradientTape.gradient``."""

    def __init__(self, session: Session, holds: Holds) -> None:
        self._session = session
        self._holds = holds
        self._steps = RareSteps()
        self._recording: Recording | None = None
        self._leaves: list[Tensor] = []
        self._judged: set[TensorKey] = set()
        """The numbers of this eager step that were checked, and their addends."""
        self._end = ExitStack()
        self._batches: Counter[str] = Counter()

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        tf_patches.TABLE.install({tf_patches.TAPE_GRADIENT: self._before_gradient})

    def begin_batch(self, data: Nest, loop: str) -> None:
        """Record the eager step in which ``loop`` uses ``data``, this rank's rows.

        ``data`` is a nested structure; each tensor in it has shape (rows, ...).
        """
        self.end_batch()
        self._batches[loop] += 1
        leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
        rare = self._batches[loop] & (self._batches[loop] - 1) == 0
        # Computations on a numpy array look like constants.
        if rare and leaves and all(map(_is_dense_tensor, leaves)):
            self._leaves = leaves
            self._recording = self._end.enter_context(recorded())
            self._holds.recording = True

    def end_batch(self) -> None:
        """Stop recording: the program has finished with the data of ``begin_batch``."""
        self._end.close()
        self._recording, self._leaves = None, []
        self._judged.clear()
        self._holds.recording = False
        self._holds.eager.clear()

    def _before_gradient(
        self,
        tape: tf.GradientTape,
        target: Nest,
        sources: Nest,
        *args: object,
        **kwargs: object,
    ) -> None:
        if any(getattr(source, "trainable", False) for source in _flat(sources)):
            if not tf.executing_eagerly() and self._has_other_rows():
                self._session.warn(
                    f"{user_line()}: this loss cannot be checked, because the batch "
                    "has ragged or sparse tensors. If it is a mean over the rows, the "
                    "result is that of one machine. If rows share a divisor, such as "
                    "the number of tokens in a batch, the result differs. Losses of "
                    "dense tensors are checked (to_tensor in the dataset)"
                )
            self._look(_flat(target), _Loss.of)

    def _has_other_rows(self) -> bool:
        """Whether a batch that is divided has rows in ragged or sparse tensors."""
        share, loop = self._session.share, self._session.loop
        if share is not None:
            rows = [leaf for leaf in _flat(share.data) if has_rows(leaf)]
            return not all(map(has_dense_rows, rows))
        if self._session.inside_keras or not loop.in_pass:
            return False
        graph = tf_internals.outermost_graph()
        return _has_composites(getattr(graph, "structured_input_signature", None))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def look_at_results(self, numbers: Sequence[Tensor], where: str) -> None:
        """Check numbers that a function of the program returns, in its graph.

        ``where`` is the line that calls it.
        """
        what = f"{where}: a number that this function returns"
        for number in numbers:
            self._look_in_graph([number], _described(what))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def look_at_report(self, number: Tensor, what: str) -> None:
        """Warn if ``number``, a scalar, is not a sum over rows, in a graph or eagerly.

        The program reports the number in a metric or in logs. The warning begins with
        ``what``. Skips numbers that were already checked: the loss of the step and its
        terms.
        """
        if not isinstance(number, tf.Tensor):
            return
        if key_of(number) not in self._judged_here():
            describe = _described(f"{user_line()}: {what}", is_reported=True)
            self._look([number], describe)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _look(self, targets: Sequence[Tensor], describe: _Describe) -> None:
        targets = [target for target in targets if isinstance(target, tf.Tensor)]
        if not targets or not all(target.dtype.is_floating for target in targets):
            return
        if tf.executing_eagerly():
            self._look_eagerly(targets, describe)
        else:
            self._look_in_graph(targets, describe)

    def _judged_here(self) -> set[TensorKey]:
        """The numbers that were checked in this graph or in this eager step."""
        if tf.executing_eagerly():
            return self._judged
        graph = tf.compat.v1.get_default_graph()
        return contract.attached(graph, "_tfcluster_judged", set[TensorKey])

    def _look_eagerly(self, targets: Sequence[Tensor], describe: _Describe) -> None:
        recording = self._recording
        if recording is None:
            return
        if len(recording.ops) > _MOST_RECORDED:
            self.end_batch()
            return
        paths = self._paths(recording.ops, targets, self._leaves)
        loss = paths and describe(paths, recording.ops, self._leaves)
        if paths and loss:
            self._judged_here().update(addends(recording.ops, targets))
            numbers = _in_orders(paths, targets, self._leaves, loss.detached)
            found = np.asarray(numbers)
            in_loop = self._session.share is None
            self._judge(loss, found, in_loop=in_loop)

    def _look_in_graph(self, targets: Sequence[Tensor], describe: _Describe) -> None:
        """Check the sum of ``targets``."""
        graph = tf.compat.v1.get_default_graph()
        leaves = self._leaves_in(graph)
        if not leaves:
            return
        ops = ops_of(graph)
        paths = self._paths(ops, targets, leaves)
        loss = paths and describe(paths, ops, leaves)
        if not paths or not loss:
            return
        self._judged_here().update(addends(ops, targets))
        in_loop = self._session.share is None
        checked = _Check()
        # The graph keeps the object alive, and with it the count of its steps.
        contract.attached(graph, "_tfcluster_checks", list[_Check]).append(checked)

        def judge(numbers: Array) -> np.bool_:
            return np.bool_(self._judge(loss, numbers, in_loop=in_loop))

        def look() -> Tensor:
            numbers = _in_orders(paths, targets, leaves, loss.detached)
            # In order: if it raises, this rank has not begun the next exchange.
            over = exchange_in_order(judge, [numbers], tf.bool)
            return self._steps.end_if(checked, tf.reshape(over, []))

        share = self._session.share
        undivided = False if share is None else share.undivided
        due = self._steps.due(checked) & tf.logical_not(undivided)
        with self._session.once(OF_A_CHECK):
            tf.cond(due, lambda: tf.group(look()), lambda: tf.no_op())

    def known_ops(self, number: Tensor) -> tuple[Sequence[Op], Sequence[Tensor]] | None:
        """The operations that computed ``number``, and the batch's tensors.

        At least one tensor is returned. Returns None if they are not known.
        """
        if tf.executing_eagerly():
            recording, leaves = self._recording, self._leaves
            if recording is None or len(recording.ops) > _MOST_RECORDED:
                return None
            return (recording.ops, leaves) if leaves else None
        graph = tf.compat.v1.get_default_graph()
        if getattr(number, "graph", graph) is not graph:
            return None
        leaves = self._leaves_in(graph)
        return (ops_of(graph), leaves) if leaves else None

    def _leaves_in(self, graph: tf.Graph) -> list[Tensor]:
        """The tensors of a graph that are known to have the batch's rows."""
        share = self._session.share
        if share is not None:
            known = {id(leaf): leaf for leaf in _flat(share.data) if has_rows(leaf)}
            if not all(map(has_dense_rows, known.values())):
                return []
            inner = [one for outer, one in graph.captures if id(outer) in known]
            return inner + [leaf for leaf in known.values() if leaf.graph is graph]
        if self._session.inside_keras:
            return []
        return _arguments_with_rows(graph, self._session.loop.present_rows())

    def _paths(
        self, ops: Sequence[Op], targets: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> list[list[Op]] | None:
        """The operations that compute each target from the batch; None if unknown."""
        held = self._holds.eager
        paths = [path_between(ops, leaves, target, held) for target in targets]
        known = [path for path in paths if path is not None]
        return known if len(known) == len(paths) and any(known) else None

    def _judge(self, loss: _Loss, numbers: Array, *, in_loop: bool) -> bool:
        """Judge a loss by the results of ``_in_orders``; return whether to stop."""
        session = self._session
        loop = session.loop
        # In a trial, one rank has every row twice, so its numbers would prove nothing.
        in_loop = in_loop and not session.inside_keras
        if in_loop and (not loop.divided or loop.share.trial):
            return False
        both, swapped, first, second, *held = numbers.tolist()
        if loss.is_reported:
            if has_row_terms(both, swapped, first, second, tolerance=loss.tolerance):
                return False
            session.warn(
                f"{loss.what} is neither a mean nor a sum over the rows of a batch. "
                "Each rank computes it from its own rows, so the reported number "
                "differs from the number on one machine; the training does not. "
                "Compute the number from tfc.gather_batch (import tfcluster.runtime as "
                "tfc)"
            )
            return True
        if not has_row_terms(both, swapped, first, second, tolerance=loss.tolerance):
            session.differs(
                f"{loss.what} is not a mean over the rows of a batch: its rows "
                "share a divisor or a statistic, as in a mean over a mask, a Dice "
                "loss, a contrastive loss, or a layer that looks at the whole batch. "
                "Each rank computes it from its own rows, so the result differs from "
                "that of one machine"
            )
            return True
        if not loss.may_have_places and not has_row_terms(
            both, both, swapped, swapped, tolerance=loss.tolerance
        ):
            session.differs(
                f"{loss.what} depends on where in the batch a row is: for instance, "
                "the first half of a batch is treated differently from the second. "
                "Each rank has only its own rows, so the result differs from that of "
                "one machine. Two datasets that are zipped (tf.data.Dataset.zip) are "
                "divided each by itself"
            )
            return True
        if held and not is_shifted(both, *held, tolerance=loss.tolerance):
            session.differs(
                f"{loss.what} is scaled by a number of the batch without gradient "
                "(tf.stop_gradient). Each rank computes that number from its own rows, "
                "so the result differs from that of one machine. Compute it from "
                "tfc.gather_batch (import tfcluster.runtime as tfc)"
            )
            return True
        return False


def has_row_terms(
    both: float, swapped: float, first: float, second: float, *, tolerance: float
) -> bool:
    """Whether a loss may be a sum over rows, from its values for AB, BA, AA and BB.

    ``tolerance`` is relative. True if a value is not finite, which proves nothing.
    """
    numbers = both, swapped, first, second
    if not all(map(math.isfinite, numbers)):
        return True
    size = max(map(abs, numbers))
    return abs(both + swapped - first - second) <= 2 * tolerance * size


def is_shifted(
    both: float,
    first: float,
    both_moved: float,
    first_moved: float,
    *,
    tolerance: float,
) -> bool:
    """Whether changing the detached numbers only adds a constant to a loss.

    The arguments are the loss for AB and for AA, each with the original and with the
    changed detached numbers.
    ``tolerance`` is relative. True if a value is not finite.
    """
    return has_row_terms(both, first_moved, first, both_moved, tolerance=tolerance)


def _in_orders(
    paths: Sequence[list[Op]],
    targets: Sequence[Tensor],
    leaves: Sequence[Tensor],
    detached: Sequence[Tensor],
) -> Tensor:
    """The sum of the targets for the rows as they are and in three other orders.

    Returns a float64 vector of four elements. If there are ``detached`` numbers, three
    more follow: for AA with the detached numbers of AB, and for AB and AA with changed
    ones.
    """

    def total(order: _Order, given: Mapping[TensorKey, Tensor]) -> Tensor:
        inputs = {**_reordered(leaves, order), **given}
        pairs = zip(paths, targets, strict=True)
        return _total([replay(path, inputs, target) for path, target in pairs])

    found = [_total(targets)]
    found += [total(order, {}) for order in (_swapped, _first_twice, _second_twice)]
    if detached:
        kept = {key_of(each): each for each in detached}
        moved = {key: 2 * each + 1 for key, each in kept.items()}
        found += [
            total(_first_twice, kept),
            total(_unchanged, moved),
            total(_first_twice, moved),
        ]
    return tf.stack(found)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return tf.add_n([tf.reduce_sum(tf.cast(t, tf.float64)) for t in tensors])


def _reordered(leaves: Sequence[Tensor], order: _Order) -> dict[TensorKey, Tensor]:
    found = {}
    for leaf in leaves:
        rows = tf.shape(leaf)[0]
        places = tf.concat([order(rows // 2), tf.range(rows // 2 * 2, rows)], 0)
        value = tf.gather(leaf, places)
        value.set_shape(leaf.shape)
        found[key_of(leaf)] = value
    return found


def _unchanged(half: Tensor) -> Tensor:
    return tf.range(2 * half)


def _swapped(half: Tensor) -> Tensor:
    return tf.concat([tf.range(half, 2 * half), tf.range(half)], 0)


def _first_twice(half: Tensor) -> Tensor:
    return tf.concat([tf.range(half), tf.range(half)], 0)


def _second_twice(half: Tensor) -> Tensor:
    return tf.concat([tf.range(half, 2 * half), tf.range(half, 2 * half)], 0)


def _read_variables(paths: Sequence[Sequence[Op]]) -> bool:
    """Whether operations of the paths read variables themselves."""
    tensors = (each for path in paths for op in path for each in op.inputs)
    return any(map(tf_internals.is_handle, tensors))


def _tolerance(paths: Sequence[Sequence[Op]]) -> float:
    """The tolerance of the least precise float type among the operations' results."""
    found = {
        output.dtype.name for path in paths for op in path for output in op.outputs
    }
    name = next((name for name in reversed(TOLERANCES) if name in found), "float32")
    return TOLERANCES[name]


def _arguments_with_rows(graph: tf.Graph, rows: int | None) -> list[Tensor]:
    """The arguments of the function being traced whose rows are the batch's.

    These are arguments with ``rows`` rows or an unknown number of rows.
    """
    signature = getattr(graph, "structured_input_signature", None)
    if signature is None:
        return []
    if _has_composites(signature):
        return []
    captured = {id(tensor) for tensor in graph.internal_captures}
    return [
        tensor
        for tensor in graph.inputs
        if id(tensor) not in captured
        and tensor.dtype not in (tf.resource, tf.variant)
        and has_rows(tensor)
        and tensor.shape.rank is not None
        and tensor.shape[0] in (None, rows)
    ]


def _has_composites(signature: Nest) -> bool:
    """Whether a function has ragged or sparse tensors among its arguments."""
    kinds = tf.RaggedTensorSpec | tf.SparseTensorSpec
    return any(isinstance(each, kinds) for each in tf.nest.flatten(signature))


def _is_dense_tensor(leaf: Leaf) -> bool:
    return tf.is_tensor(leaf) and has_dense_rows(leaf)


def _flat(structure: Nest) -> list[Any]:
    """The leaves, not typed as ``Leaf``, so that leaves with rows count as tensors."""
    return [] if structure is None else list(keras.tree.flatten(structure))

"""Computes losses that depend on the batch as a whole from all ranks' rows.

Keras's own losses have a value for each row. It is unknown how a custom loss, or a loss
that returns one number, combines the rows. So it gets the rows of all ranks: see
``whole_batch``. In the first step, and in a few later ones, it is also computed for
both halves of these rows. If it is a mean over the rows, each rank computes it from its
own rows from then on, which costs no exchange. A sum is refused.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract
from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.batches.batch_slicing import rows_in
from tfcluster.runtime.keras.checks.check_steps import RareSteps
from tfcluster.runtime.keras.checks.known_objects import KnownObjects
from tfcluster.runtime.keras.checks.loss_reduction import kind_of_loss, same_rows
from tfcluster.runtime.keras.checks.op_replay import (
    Holds,
    Op,
    detached_numbers,
    ops_of,
    recorded,
)
from tfcluster.runtime.keras.checks.rounding import TOLERANCES
from tfcluster.runtime.keras.checks.types import Loss
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.losses.whole_batch import WholeBatch, can_be_gathered
from tfcluster.runtime.keras.session import BY_ROWS, OF_ALL_ROWS, Session, Share
from tfcluster.runtime.tensor_types import Nest, Tensor, TensorLike

_IN_OWN_CALL = "the __call__ of a loss of the program"
_KINDS = ("unknown", "mean", "sum", "whole batch")


class WholeBatchLosses:
    """The hook on ``Loss.__call__``."""

    def __init__(self, session: Session, whole_batch: WholeBatch, holds: Holds) -> None:
        self._session = session
        self._whole_batch = whole_batch
        self._holds = holds
        self._local = threading.local()
        self._steps = RareSteps()
        self._detached: weakref.WeakKeyDictionary[Loss, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._means = KnownObjects()
        """Flags the losses that are means over rows."""

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.LOSS_CALL: self._call})

    @contextmanager
    def _looking_for_detached_numbers(self, loss: Loss, y_pred: Nest) -> Iterator[None]:
        """Record whether a loss uses a number of the batch without its gradient.

        The value of such a loss may be a mean over rows while its gradient is not.
        """
        if loss in self._detached:
            yield
            return
        if tf.executing_eagerly():
            with recorded() as recording:
                yield
            ops: Sequence[Op] = recording.ops
        else:
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            yield
            ops = ops_of(graph)[before:]
        rows = tf.convert_to_tensor(keras.tree.flatten(y_pred)[0]).shape[:1]
        known = rows[0] if rows.rank else None
        self._detached[loss] = bool(detached_numbers(ops, known))

    def returned(self, values: TensorLike) -> bool:
        """Record the values that the loss being called returned before its reduction.

        ``values`` has a number for each row, of shape (rows, ...), or is a scalar.
        Returns whether the values belong to all ranks' rows.
        """
        self._local.values = values
        return self._session.within(OF_ALL_ROWS)

    def _call(
        self, original: Callable[..., Tensor], loss: Loss, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call a loss: Keras's ``__call__``, or the one of a class of the program."""
        session = self._session
        if session.within(_IN_OWN_CALL):
            return original(loss, *args, **kwargs)
        defined_in = contract.defining_class(type(loss), "__call__")
        if defined_in is keras.losses.Loss:
            return self._reduced(original, loss, *args, **kwargs)
        # Keras passes the labels, the predictions and the weights by position.
        by_position = not kwargs and len(args) in (2, 3)
        if internals.is_of_keras(defined_in) or not by_position:
            return original(loss, *args, **kwargs)  # Keras's CompileLoss, for example.

        def own_call(_: Loss, *given: Nest) -> Tensor:
            """What the program computes from these rows, as one number."""
            with session.once(_IN_OWN_CALL):
                self._local.values = original(loss, *given[: len(args)])
            return self._local.values

        return self._reduced(own_call, loss, *args)

    def _reduced(
        self,
        original: Callable[..., Tensor],
        loss: Loss,
        y_true: Nest,
        y_pred: Nest,
        sample_weight: Nest = None,
    ) -> Tensor:
        self._local.values = None
        with self._looking_for_detached_numbers(loss, y_pred):
            result = original(loss, y_true, y_pred, sample_weight)
        values, share = self._local.values, self._session.share
        if values is None or share is None or share.alone:
            return result
        if self._session.size == 1 and self._session.current_shard is None:
            return result
        if self._session.within(BY_ROWS):
            return result
        values = tf.convert_to_tensor(values)
        if values.shape.rank != 0 and _is_by_row(loss):
            return result
        given = [y_true, y_pred, sample_weight]
        if not can_be_gathered(given):
            return result
        if self._session.current_shard is not None:
            return self._of_a_shard(original, loss, given, result, share)
        return self._of_all_rows(original, loss, given, result, share.undivided)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _of_all_rows(
        self,
        original: Callable[..., Tensor],
        loss: Loss,
        given: list[Nest],
        local: Tensor,
        undivided: bool | Tensor,
    ) -> Tensor:
        is_mean = self._means.of(loss)
        due = self._steps.due(loss)
        local = tf.convert_to_tensor(local)
        zero = tf.zeros_like(local)
        undivided = tf.cast(undivided, tf.bool)
        # Read before the check, which may change it.
        by_rank = undivided | is_mean.read_value()

        def gathered() -> Tensor:
            what = f"rows for the loss {_name(loss)}"
            whole = self._whole_batch.gather_nested(given, what)
            with self._session.once(OF_ALL_ROWS):
                result = original(loss, *whole)
                values = tf.convert_to_tensor(self._local.values)
            look = tf.cond(
                due,
                lambda: self._look(original, loss, whole, values, is_mean),
                lambda: tf.constant(False),
            )
            with tf.control_dependencies([look]):
                found: Tensor = tf.identity(tf.convert_to_tensor(result))
            return found

        not_needed = undivided | (by_rank & ~due)
        of_all = tf.cond(not_needed, lambda: tf.identity(zero), gathered)
        # The result is a sum of two terms, so that checks can examine the loss of this
        # rank's rows. The other term does not depend on how the batch is divided.
        held = self._holds.hold(tf.where(by_rank, zero, of_all))
        result: Tensor = tf.where(by_rank, local, zero) + held
        return result

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _of_a_shard(
        self,
        original: Callable[..., Tensor],
        loss: Loss,
        given: list[Nest],
        result: Tensor,
        share: Share,
    ) -> Tensor:
        """Return ``result``; refuse it unless it is the mean over the shard's rows."""
        is_mean = self._means.of(loss)
        values = tf.convert_to_tensor(self._local.values)
        counts = tf.cast(share.counts, tf.bool)
        undivided = tf.cast(share.undivided, tf.bool)
        due = ~undivided & counts & (self._steps.due(loss) | ~is_mean.read_value())
        looked = tf.cond(
            due,
            lambda: self._look(original, loss, given, values, is_mean, in_shard=True),
            lambda: tf.constant(False),
        )
        with tf.control_dependencies([looked]):
            found: Tensor = tf.identity(result)
        return found

    def _look(
        self,
        original: Callable[..., Tensor],
        loss: Loss,
        given: list[Nest],
        values: Tensor,
        is_mean: tf.Variable,
        *,
        in_shard: bool = False,
    ) -> Tensor:
        """Judge a loss by its value for all rows and its values for their halves.

        With ``in_shard``, the rows belong to a shard, and no other rank takes part.
        """
        y_true, y_pred, sample_weight = given
        weighted = sample_weight is not None
        rows = tf.cast(rows_in(keras.tree.flatten(y_pred)[0]), tf.int64)
        dtype = getattr(loss, "dtype", keras.config.floatx())
        tolerance = TOLERANCES.get(dtype, max(TOLERANCES.values()))
        has_own_call = not internals.is_of_keras(type(loss).__call__)

        def part(start: int | Tensor, stop: int | Tensor) -> Tensor:
            def slice_rows(tensor: Tensor) -> Tensor:
                rows = tensor[start:stop]
                return rows if has_own_call else tf.cast(rows, dtype)

            true = keras.tree.map_structure(slice_rows, y_true)
            pred = keras.tree.map_structure(slice_rows, y_pred)
            if has_own_call:
                with self._session.once(OF_ALL_ROWS):
                    found = original(loss, true, pred, None)
            else:
                found = loss.call(true, pred)
            return tf.cast(tf.stop_gradient(found), tf.float64)

        def judge(whole: Array, first: Array, second: Array, rows: Array) -> Array:
            if whole.ndim:
                parts = np.concatenate([first, second])
                kind = "mean" if same_rows(whole, parts, tolerance) else "whole batch"
            else:
                halves = float(first), float(second)
                kind = kind_of_loss(float(whole), halves, int(rows), tolerance)
                # Keras multiplies it by the mean weight.
                if kind == "mean" and (weighted or self._detached.get(loss)):
                    kind = "whole batch"
            judged = self._judge_in_shard if in_shard else self._judge
            return np.array(judged(_name(loss), kind, bool(is_mean.numpy())))

        def look() -> Tensor:
            half = rows // 2
            parts = [part(0, half), part(half, rows)]
            whole = tf.cast(tf.stop_gradient(values), tf.float64)
            said = exchange_in_order(judge, [whole, *parts, rows], tf.bool)
            mean, over = tf.unstack(tf.ensure_shape(said, [2]))
            changes = [
                is_mean.assign(mean, read_value=False),
                self._steps.end_if(loss, over),
            ]
            with tf.control_dependencies(changes):
                return tf.identity(over)

        def too_few() -> Tensor:
            if not in_shard:
                return tf.constant(False)

            def refuse(was_mean: np.bool_) -> np.bool_:
                if not was_mean:
                    session.refuse(
                        f"the loss {_name(loss)} is the program's own, or returns one "
                        "number. With runtime.shards it must be a mean over rows, "
                        "which can be checked only if each shard of the first batch "
                        "has two rows or more: a batch needs "
                        f"{2 * (session.shards or 1)}"
                    )
                return np.bool_(False)

            session = self._session
            checked: Tensor = tf.ensure_shape(
                tf.numpy_function(refuse, [is_mean.read_value()], tf.bool), []
            )
            return checked

        over: Tensor = tf.cond(rows >= 2, look, too_few)
        return over

    def _judge_in_shard(
        self, name: str, kind: str, was_mean: bool
    ) -> tuple[bool, bool]:
        """Like ``_judge``, for a shard's rows; refuses all but a mean over rows."""
        if kind == "sum":
            self._refuse_sum(name)
        if kind == "whole batch":
            self._session.refuse(
                f"the loss {name} is not a mean over the rows of a batch. With "
                "runtime.shards, a step computes one shard after the other and cannot "
                "see the others' rows. Run the job without runtime.shards"
            )
        return kind == "mean" or was_mean, False

    def _refuse_sum(self, name: str) -> NoReturn:
        self._session.refuse(
            f"the loss {name} returns the sum over the rows of a batch: a function "
            "must return their mean, or one number for each row (a keras.Loss may "
            "have reduction='sum')"
        )

    def _judge(self, name: str, kind: str, was_mean: bool) -> tuple[bool, bool]:
        """Whether a loss counts as a mean from now on, and whether the check is over.

        All ranks have the same rows, but their processors may round differently.
        Raises CollectiveError for a sum, on all ranks.
        """
        session = self._session
        if session.waits_in_steps:
            number = np.array([_KINDS.index(kind)])
            signature = Signature(f"kind of the loss {name}")
            (found,) = reduce_arrays(session.group, [number], ReduceOp.MAX, signature)
            kind = _KINDS[int(found[0])]
        if kind == "sum":
            self._refuse_sum(name)
        if kind == "whole batch" and not session.waits_in_steps:
            session.warn(
                f"the loss {name} is not a mean over the rows of a batch: each rank "
                "computes it from its own rows"
            )
        elif kind == "whole batch" and was_mean:
            session.differs(
                f"the loss {name} was a mean over the rows of the first batches, but "
                "is not a mean any more. In the steps before this one, each rank "
                "computed it from its own rows, so the result may differ from that of "
                "one machine. From now on it is computed from all rows"
            )
        is_mean = kind == "mean" or (kind == "unknown" and was_mean)
        return is_mean, kind == "whole batch"


def _name(loss: Loss) -> str:
    """The name of a loss; a class of the program may not call Keras's ``__init__``."""
    return str(getattr(loss, "name", None) or type(loss).__name__)


def _is_by_row(loss: Loss) -> bool:
    """Whether this is a Keras loss in which a row's value depends on that row only."""
    pairs = getattr(keras.losses, "Circle", None)
    if pairs is not None and isinstance(loss, pairs):
        return False
    function = getattr(loss, "fn", None) or type(loss).call
    return internals.is_of_keras(function)

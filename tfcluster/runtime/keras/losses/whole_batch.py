"""Gathers all rows of a batch on every rank, for code that must see the whole batch.

A contrastive loss, or a correlation, depends on all rows of a batch together. A mean
over the ranks cannot replace it. So every rank gets all rows and computes the same
number, and each rank gets back the gradient of its own rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature, tensor_words
from tfcluster.runtime.collective.ragged_collectives import allgatherv
from tfcluster.runtime.exchange.graph_ops import require_numbers
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.batches.batch_slicing import has_dense_rows
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import BY_ROWS, TRIAL_RANK, Session, Share
from tfcluster.runtime.tensor_types import Array, Nest, Tensor, TensorLike
from tfcluster.runtime.tensors import is_inexact

_PLACE = 4
"""The length of the array that describes this rank's rows; see ``_own_gradient``."""

_Nested = TypeVar("_Nested")
_Gradients = list[Tensor | None]

installed: WholeBatch | None = None
"""The process's WholeBatch; None without the hooks for synchronous ranks."""


def gather_batch(*tensors: TensorLike) -> Any:
    """All ranks' rows of tensors that have this rank's rows of the current batch.

    For a loss or a metric of your own step that depends on the batch as a whole, such
    as a contrastive loss::

        images, texts = tfc.gather_batch(images, texts)
        loss = contrastive(images, texts)

    The first dimension of each tensor has one or more entries per row of this rank's
    part of the batch; ``allreduce`` lists the supported dtypes. The result has the
    entries of all ranks, in the order of one machine, and the same dtype and other
    dimensions. Every rank then computes the same loss, and ``tape.gradient`` returns
    the gradient of the whole batch. Returns a tensor, or a tuple if several are given.
    All ranks must call this at the same point of a step. Without ranks, with
    asynchronous ranks, with ``local_sgd``, and for a batch that is not divided, it
    returns the tensors unchanged.

    Raises TypeError for strings and ValueError for scalars. When the step runs, raises
    CollectiveMismatchError on all ranks if dtypes or other dimensions differ, and
    another CollectiveError if a rank is lost or late. PyTorch's counterpart is
    ``all_gather`` of torch/distributed/nn/functional.py.
    """
    found = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in found:
        require_numbers(tensor.dtype, "gather_batch")
        if tensor.shape.rank == 0:
            raise ValueError("gather_batch takes tensors of at least one dimension")
    if installed is not None and installed.may_gather(needed=True):
        found = installed.gather(found, "gather_batch")
    return found[0] if len(found) == 1 else tuple(found)


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's rows while a step runs."""

    counted: float
    present: float
    doubles: bool
    undivided: bool


class WholeBatch:
    """Gathers the rows of the step that is being traced or that runs eagerly."""

    def __init__(self, session: Session, holds: Holds) -> None:
        self._session = session
        self._holds = holds

    def install(self) -> None:
        """Make ``gather_batch`` use this object."""
        global installed
        installed = self

    def may_gather(self, *, needed: bool = False) -> bool:
        """Whether the ranks run this code together, with parts of one batch.

        With ``needed``, raises CollectiveError where a step computes a shard by itself.
        """
        session, share = self._session, self._session.share
        if needed and share is not None and not share.alone:
            session.refuse_in_shard("gather_batch gathers")
        if session.size == 1 or not session.waits_in_steps:
            return False
        if session.current_shard is not None:
            return False
        if session.within(BY_ROWS):
            return False  # Ranks have different numbers of rows, so of calls too.
        if share is not None:
            return not share.alone and share.undivided is not True
        return not session.inside_keras

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gather(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The rows of all ranks; ``what`` names the exchange.

        Each tensor has one entry, or several, for each row of this rank in its first
        dimension, and a dtype of ``graph_ops.NUMBERS``; results have the same dtypes
        and other dimensions. All are exchanged at once. Raises what
        ``exchange_in_order`` and ``Group.exchange`` raise; in a graph, when the op
        runs.
        """
        share = self._session.share
        inputs = [] if share is None else _inputs(share)

        def run(*values: Array) -> list[Array]:
            arrays = values[: len(tensors)]
            return self._gathered(arrays, self._rows(values[len(tensors) :]), what)

        def gathered(*flat: Tensor) -> tuple[list[Tensor], Callable[..., _Gradients]]:
            types = [*(tensor.dtype for tensor in flat), tf.int64]
            *whole, places = exchange_in_order(run, [*flat, *inputs], types)
            places.set_shape([len(flat), _PLACE])
            for result, tensor in zip(whole, flat, strict=True):
                result.set_shape([None, *tensor.shape[1:]])

            def gradients(*upstream: Tensor | None) -> _Gradients:
                return [
                    None
                    if gradient is None or not is_inexact(tensor)
                    else _own_gradient(gradient, tf.shape(tensor)[0], places[place])
                    for place, (gradient, tensor) in enumerate(
                        zip(upstream, flat, strict=True)
                    )
                ]

            return whole, gradients

        if any(map(is_inexact, tensors)):
            whole = tf.nest.flatten(tf.custom_gradient(gathered)(*tensors))
        else:
            whole, _ = gathered(*tensors)
        # The results are equal on all ranks: checks of this rank's rows do not apply.
        return list(map(self._holds.hold, whole))

    def gather_nested(self, given: _Nested, what: str) -> _Nested:
        """``gather`` the tensors of a structure, with the masks that layers attached.

        Returns ``given`` itself if the ranks do not run this code together. Leaves that
        are not dense tensors with rows are passed on. Raises what ``gather`` raises.
        """
        if not self.may_gather():
            return given
        leaves = [leaf for leaf in keras.tree.flatten(given) if has_dense_rows(leaf)]
        masks = [internals.keras_mask(leaf) for leaf in leaves]
        rows = self.gather(
            [*map(tf.convert_to_tensor, leaves), *(m for m in masks if m is not None)],
            what,
        )
        of_masks = iter(rows[len(leaves) :])
        whole = {}
        for leaf, mask, tensor in zip(leaves, masks, rows, strict=False):
            if mask is not None:
                internals.set_keras_mask(tensor, next(of_masks))
            whole[id(leaf)] = tensor

        def of_all(leaf: Any) -> Any:
            return whole.get(id(leaf), leaf)

        found: _Nested = keras.tree.map_structure(of_all, given)
        return found

    def _rows(self, values: Sequence[Array]) -> _Rows:
        """This rank's rows, given the values of ``_inputs`` in a step of ``fit``."""
        session = self._session
        if values:
            counted, present = float(values[0]), float(values[1])
            doubles = bool(values[2]) and session.rank == TRIAL_RANK
            return _Rows(counted, present, doubles, undivided=bool(values[3]))
        share = session.loop.share
        if not session.divides:
            return _Rows(1.0, 1.0, doubles=False, undivided=not session.loop.in_pass)
        doubles = bool(share.trial) and session.rank == TRIAL_RANK
        counted, present = float(share.rows), float(share.present)
        return _Rows(counted, present, doubles, undivided=not session.loop.is_dividing)

    def _gathered(self, arrays: Sequence[Array], rows: _Rows, what: str) -> list[Array]:
        """The arrays of all ranks, and this rank's position in each of them."""
        if rows.undivided:
            places = [[0, len(array), len(array), 1] for array in arrays]
            return [*arrays, np.array(places, np.int64)]
        words = tuple(
            tensor_words("rows of", array.dtype.name, array.shape[1:])
            for array in arrays
        )
        # A rank may compute rows that do not count; they come last.
        kept = rows.counted / rows.present if rows.present else 0.0
        parts = [array[: round(len(array) * kept)] for array in arrays]
        with self._session.group.exchange(Signature(what, words)) as call:
            found = [allgatherv(call.transport, part) for part in parts]
        # In a trial, this rank has the chief's rows twice.
        rank, copies = (0, 2) if rows.doubles else (self._session.rank, 1)
        places = [
            [counts[:rank].sum(), counts[rank], counts.sum(), copies]
            for _, counts in found
        ]
        return [*(whole for whole, _ in found), np.array(places, np.int64)]


def can_be_gathered(given: Nest) -> bool:
    """Whether ``gather_nested`` can exchange all tensors and arrays of a structure."""
    return all(
        leaf is None or (has_dense_rows(leaf) and tf.as_dtype(leaf.dtype) != tf.string)
        for leaf in keras.tree.flatten(given)
    )


def _inputs(share: Share) -> list[Tensor]:
    """The values that ``_rows`` needs from a step of ``fit`` when the step runs."""
    return [
        tf.cast(share.rows, tf.float64),
        tf.cast(share.present, tf.float64),
        tf.cast(share.trial, tf.bool),
        tf.cast(share.undivided, tf.bool),
    ]


def _own_gradient(gradient: Tensor, length: Tensor, place: Tensor) -> Tensor:
    """The gradient of this rank's rows, from the gradient of all rows.

    ``place`` has this rank's first row, its number of rows, the number of rows of all
    ranks, and how many times this rank has each row. The ranks' gradients are averaged
    by rows afterwards, so this rank's gradient is multiplied by the inverse of its
    fraction. The result has ``length`` rows; rows that do not count get zeros.
    """
    gradient = tf.convert_to_tensor(gradient)
    first, count, total, copies = tf.unstack(place)
    factor = tf.math.divide_no_nan(
        tf.cast(total, tf.float64), tf.cast(count * copies, tf.float64)
    )
    part = gradient[first : first + count] * tf.cast(factor, gradient.dtype)
    padded = tf.concat([part, tf.zeros_like(gradient[:1])], 0)
    rows = tf.range(tf.cast(length, tf.int64))
    chosen = tf.where(rows < count * copies, rows % tf.maximum(count, 1), count)
    own: Tensor = tf.gather(padded, chosen)
    return own

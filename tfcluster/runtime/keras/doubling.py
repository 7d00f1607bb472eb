"""Finds steps of the program's own whose loss is no mean over the rows of a batch.

What a loop or a ``train_step`` makes of a batch is its own business. But when every row
comes twice, a mean over rows is what it was and a sum is twice that, and so are their
gradients. So in one step a rank gets the rows of the chief, each twice, in place of its
own, which the others take over. Its gradient does not count; it is compared with the
chief's.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError, Layout
from tfcluster.runtime.collective.operations import gather_bytes, share_bytes
from tfcluster.runtime.collective.transport import Array, flat_bytes
from tfcluster.runtime.division import trial_bounds
from tfcluster.runtime.growth import growth
from tfcluster.runtime.keras.rows import (
    Part,
    cut,
    has_dense_rows,
    has_rows,
    repeated,
    rows_in,
)
from tfcluster.runtime.keras.session import DOUBLING_RANK, Session
from tfcluster.runtime.keras.whole_batch import Judged
from tfcluster.runtime.keras.wrapping import defining_class

_SUM, _DOUBTFUL = 1.75, 1.25
"""From where on a gradient that has grown so much is of a sum, or in part."""
_OWN = ("train_step", "compute_loss")


class Doubling:
    """See ``session.Trials``; and the first step of models with one of their own."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._models = Judged()

    def allowed(self) -> bool:
        # A rank has up to four times as many rows as else: a GPU may have no room.
        ours = b"" if tf.config.list_logical_devices("GPU") else b"1"
        layout = Layout("whether rows may come twice")
        return all(gather_bytes(self._session.group, ours, layout))

    def judge(self, optimizer: str, ours: Sequence[Array]) -> None:
        session = self._session
        what = f"gradients of {optimizer} for rows that come twice"
        sent = flat_bytes(ours) if session.chief else b""
        chiefs = _like(ours, share_bytes(session.group, sent, 0, Layout(what)))
        found = growth(ours, chiefs) if session.rank == DOUBLING_RANK else 0.0
        said = gather_bytes(session.group, struct.pack("d", found), Layout(what))
        (found,) = struct.unpack("d", said[DOUBLING_RANK])
        if found >= _SUM:
            session.group.refusal = CollectiveError(
                f"the gradients for {optimizer} grow with the rows of a batch: the "
                "loss is a sum over them, or one that is divided by a fixed number. "
                "Each rank has only some of the rows, so it has to be the mean over "
                "those that are there: tf.reduce_mean, or a sum divided by "
                "tf.shape(x)[0]"
            )
            raise session.group.refusal
        if found >= _DOUBTFUL:
            session.warn(
                f"the gradients for {optimizer} are {found:.1f} times as large when "
                "every row of a batch comes twice: a part of the loss is no mean over "
                "rows, and comes out too small"
            )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def first(self, model: Any, data: Any, part: Part) -> Part:
        """This rank's ``part`` of ``data``; in a model's first step that of a trial."""
        leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
        if (
            self._session.trials is None
            or not _has_own_step(model)
            or not leaves
            or not all(map(_may_grow, leaves))
        ):
            return part
        rank, size = self._session.rank, self._session.size
        counts = tf.stack([tf.cast(rows_in(leaf), tf.int64) for leaf in leaves])
        batch = counts[0]
        fits = tf.reduce_all(tf.equal(counts, batch)) & (batch >= size)
        known = self._models.of(model)
        trial = tf.cond(
            known.read_value() | ~fits, lambda: tf.constant(False), self._agreed
        )
        known.assign(known.read_value() | fits)
        start, stop = trial_bounds(batch, rank, size)
        times = 2 if rank == DOUBLING_RANK else 1

        def either(whole: Any, own: Any) -> Any:
            if not has_rows(whole):
                return whole
            tried = repeated(cut(tf.convert_to_tensor(whole), start, stop), times)
            return tf.cond(trial, lambda: tried, lambda: tf.convert_to_tensor(own))

        share, rows = part.share, stop - start
        counted = tf.zeros_like(rows) if times > 1 else rows
        return Part(
            tf.nest.map_structure(either, data, part.data),
            dataclasses.replace(
                share,
                rows=_where(trial, counted, share.rows, tf.float64),
                counts=_where(trial, counted > 0, share.counts, tf.bool),
                total=_where(trial, batch, share.total, tf.float64),
                present=_where(trial, rows * times, share.rows, tf.float64),
                trial=trial,
            ),
        )

    def _agreed(self) -> Any:
        found = tf.numpy_function(lambda: np.bool_(self.allowed()), [], tf.bool)
        return tf.reshape(found, [])


def _like(arrays: Sequence[Array], data: bytes) -> list[Array]:
    """Arrays of the same shapes and dtypes, one after the other in ``data``."""
    found, offset = [], 0
    for array in arrays:
        flat = np.frombuffer(data, array.dtype, array.size, offset)
        found.append(flat.reshape(array.shape))
        offset += array.nbytes
    return found


def _has_own_step(model: Any) -> bool:
    """Whether its class says by itself what a step, or the loss, is."""
    return any(
        defining_class(type(model), name).__module__.partition(".")[0]
        != keras.__name__.partition(".")[0]
        for name in _OWN
    )


def _may_grow(leaf: Any) -> bool:
    """Whether a graph that is traced for it takes any number of rows."""
    if not has_dense_rows(leaf):
        return False
    return tf.executing_eagerly() or leaf.shape[0] is None


def _where(trial: Any, then: Any, other: Any, dtype: Any) -> Any:
    return tf.where(trial, tf.cast(then, dtype), tf.cast(other, dtype))

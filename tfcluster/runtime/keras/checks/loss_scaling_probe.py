"""Finds custom training steps whose loss is not a mean over the rows of a batch.

The runtime cannot see how a loop or a ``train_step`` computes its loss. But if every
row of a batch is repeated, a mean over the rows stays the same and a sum doubles, and
so do their gradients. So in one step, one rank gets the chief's rows, each twice,
instead of its own, which the other ranks take over. The gradient of that rank has no
weight; it is only compared with the chief's. The method is tfcluster's own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, broadcast_bytes
from tfcluster.runtime.collective.transports.base import Array, flat_bytes
from tfcluster.runtime.keras.checks.gradient_ratio import GradientRatio, gradient_ratio
from tfcluster.runtime.keras.session import TRIAL_RANK, Session

_SUM, _DOUBTFUL = 1.75, 1.25
"""A gradient that grows by these factors belongs to a loss that is a sum, or that is
partly a sum."""
_CERTAIN, _LIKELY = 0.95, 0.5
"""Minimum cosine similarities. Random effects (dropout, a GAN's noise) also change the
direction of the gradient."""
_RATIO = struct.Struct("dd")


class LossScalingProbe:
    """The implementation of ``session.Trials``."""

    def __init__(self, session: Session) -> None:
        self.judged = 0
        self._session = session

    def allowed(self) -> bool:
        """Whether no rank uses a GPU; all ranks must call this.

        Raises what ``Group.exchange`` raises.
        """
        # A rank gets up to four times its usual rows, perhaps too many for a GPU's
        # memory.
        ours = b"" if tf.config.list_logical_devices("GPU") else b"1"
        signature = Signature("whether rows may come twice")
        return all(allgather_bytes(self._session.group, ours, signature))

    def judge(self, optimizer: str, ours: Sequence[Array]) -> bool:
        """See ``session.Trials``. ``TRIAL_RANK`` is compared with the chief.

        ``ours`` has a float array for each variable, of equal shapes and dtypes on all
        ranks. A gradient with the same direction and about twice the length is refused
        with CollectiveError on all ranks. A gradient that grows less is refused too, or
        causes a warning.
        """
        session = self._session
        what = f"gradients of {optimizer} for rows that come twice"
        sent = flat_bytes(ours) if session.chief else b""
        chiefs = _like(ours, broadcast_bytes(session.group, sent, 0, Signature(what)))
        found = GradientRatio(0.0, 0.0)
        if session.rank == TRIAL_RANK:
            found = gradient_ratio(ours, chiefs)
        packed = allgather_bytes(session.group, _RATIO.pack(*found), Signature(what))
        return self._judged(
            optimizer, GradientRatio(*_RATIO.unpack(packed[TRIAL_RANK]))
        )

    def judge_repeated(
        self, optimizer: str, repeated: Sequence[Array], once: Sequence[Array]
    ) -> bool:
        """See ``session.Trials``; the chief's gradients decide."""
        ours = _RATIO.pack(*gradient_ratio(repeated, once))
        signature = Signature(f"gradients of {optimizer} for rows that come twice")
        packed = allgather_bytes(self._session.group, ours, signature)
        return self._judged(optimizer, GradientRatio(*_RATIO.unpack(packed[0])))

    def _judged(self, optimizer: str, found: GradientRatio) -> bool:
        """Refuse a gradient that grows, or warn; return whether it was conclusive."""
        session = self._session
        if found.times >= _SUM and found.cosine >= _CERTAIN:
            session.refuse(
                f"the gradients for {optimizer} grow with the number of rows in a "
                "batch: the loss is a sum over the rows, or a sum divided by a fixed "
                "number. Each rank has only some of the rows, so the loss must be the "
                "mean over the rows present: tf.reduce_mean, or a sum divided by "
                "tf.shape(x)[0]"
            )
        if found.times >= _DOUBTFUL and found.cosine >= _LIKELY:
            text = (
                f"the gradients for {optimizer} are {found.times:.1f} times as large "
                "when every row of a batch comes twice: a part of the loss is not a "
                "mean over rows and comes out too small"
            )
            if found.cosine >= _CERTAIN:
                session.differs(text)
            else:
                session.warn(
                    f"{text}, unless this is a coincidence (random numbers also differ)"
                )
        known = found.cosine != 0.0
        self.judged += known
        return known


def _like(arrays: Sequence[Array], data: bytes) -> list[Array]:
    """Split ``data`` into arrays of the same shapes and dtypes as ``arrays``."""
    found, offset = [], 0
    for array in arrays:
        flat = np.frombuffer(data, array.dtype, array.size, offset)
        found.append(flat.reshape(array.shape))
        offset += array.nbytes
    return found

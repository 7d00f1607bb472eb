"""The number of this rank's rows of a batch, for code that runs in a traced step.

``fit`` knows the number while it traces the step: it is a constant or a tensor of the
step's graph. In a custom training loop it is known only when the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.session import Session


class StepRows:
    """The rows of the step that is being traced or that runs eagerly."""

    def __init__(self, session: Session) -> None:
        self._session = session
        share = session.share
        self.in_loop = share is None
        """Whether the step belongs to a custom training loop."""
        self.inputs: list[Any] = (
            [] if share is None else [tf.cast(share.rows, tf.float64)]
        )
        """Tensors whose values ``of`` and ``weight`` get when the step runs."""

    def of(self, values: Sequence[Array]) -> float:
        """This rank's number of rows, given the values of ``inputs``.

        They are float64 scalars.
        """
        return float(values[0] if values else self._session.loop.share.rows)

    def weight(self, values: Sequence[Array]) -> float:
        """This rank's weight in a mean over the ranks; ``values`` as for ``of``.

        In an undivided loop all ranks have computed the same batch, so only the chief
        counts.
        """
        session = self._session
        if self.in_loop and session.divides and not session.loop.divided:
            return float(session.chief)
        return self.of(values)

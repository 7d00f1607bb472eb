"""How many rows of the batch this rank has, for code that runs within a traced step.

``fit`` knows the number while it traces the step: it is a constant or a tensor of the
step's graph. In a loop of the program's own the number is known when the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.session import Session


class StepRows:
    """The rows of the step that is being traced, or that runs eagerly."""

    def __init__(self, session: Session) -> None:
        self._session = session
        share = session.share
        self.in_loop = share is None
        """Whether the step belongs to a loop of the program's own."""
        self.inputs: list[Any] = (
            [] if share is None else [tf.cast(share.rows, tf.float64)]
        )
        """Tensors whose values ``of`` and ``weight`` need when the step runs."""

    def of(self, values: Sequence[Array]) -> float:
        """This rank's rows, given the values of ``inputs``."""
        return float(values[0]) if values else self._session.loop.rows

    def weight(self, values: Sequence[Array]) -> float:
        """This rank's weight in a mean over the ranks.

        Where a loop is not divided all ranks have computed the same: the chief counts.
        """
        session = self._session
        if self.in_loop and session.divides and not session.loop.divided:
            return float(session.chief)
        return self.of(values)

"""Dropout and augmentation draw other numbers on each rank, as they do for each row.

The states of the seed generators stay the same on all ranks; only what is drawn in a
training step is moved by the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.wrapping import wrap

_STRIDE = 7_368_787
"""A prime, so that ranks meet each other's seeds late."""


class Randomness:
    """The hook on ``SeedGenerator.next``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self) -> None:
        wrap(keras.random.SeedGenerator, "next", self._next)

    def _next(
        self, original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        seed = original(generator, *args, **kwargs)
        if self._session.share is None or self._session.chief:
            return seed
        return seed + tf.constant([self._session.rank * _STRIDE, 0], seed.dtype)

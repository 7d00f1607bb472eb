"""Which variables layers update from the data that they see: moving averages mostly.

They are found by watching: assigned within a layer's call, not trained, floating point.
Each rank sees other rows, so they are averaged together with the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state


class LayerState:
    """Variables that have been assigned while a layer was called."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}

    def assigned(self, variable: Any) -> None:
        if (
            not variable.trainable
            and id(variable) not in self._seen
            and tf.as_dtype(variable.dtype).is_floating
            and global_state.get_global_attribute("current_call_ctx") is not None
        ):
            self._seen[id(variable)] = weakref.ref(variable)

    def among(self, variables: Iterable[Any]) -> list[Any]:
        """Those of ``variables`` that layers update, in the given order."""
        return [
            variable
            for variable in variables
            if (seen := self._seen.get(id(variable))) and seen() is variable
        ]

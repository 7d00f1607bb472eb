"""An optimizer's update as bytes: traced where the optimizer is, run where it is not.

The graph of a ``tf.function`` with its library, and which of its inputs are which
variables. So a ps applies every optimizer that TensorFlow can trace, also a class of the
user's own, and needs neither Keras nor the program's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Apply = Callable[[list[Any]], None]
"""Applies gradients (a tensor, IndexedSlices or None for each piece)."""


def serialised(
    apply: Apply, variables: Sequence[Any], slots: Mapping[str, Any], kinds: str
) -> bytes:
    """The update that ``apply`` makes.

    ``variables`` are tf.Variables of the pieces' shapes, in order; ``slots`` the
    optimizer's own, by path, with their first values. Their values travel only for
    slots. ``kinds`` says what gradients are given: see ``client.Pack``.
    """
    raise NotImplementedError

"""Names for the types of TensorFlow's objects, which has no types of its own."""

from __future__ import annotations

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
"""A ``tf.Tensor``, eager or of a graph, or what ``tf.convert_to_tensor`` takes."""

Gradient: TypeAlias = Any
"""A tensor, ``tf.IndexedSlices``, or None."""

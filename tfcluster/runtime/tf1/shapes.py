"""Dtype and shape of a variable, from the op that creates it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime.tensor_types import DType, Message, Operation


def dtype_and_shape(
    op: Operation | Message,
) -> tuple[DType | None, tuple[int, ...] | None]:
    """A variable op's dtype and shape, each None if unknown.

    ``op`` is an operation or its ``NodeDef``.
    """
    node: Any = getattr(op, "node_def", op)
    if "dtype" not in node.attr or "shape" not in node.attr:
        return None, None
    shape = tf.TensorShape(node.attr["shape"].shape)
    known = shape.is_fully_defined()
    return (
        tf.as_dtype(node.attr["dtype"].type),
        tuple(int(size) for size in shape.as_list()) if known else None,
    )

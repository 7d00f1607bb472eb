# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Computes gradients of ``rows @ matrix`` and prints how: ``{"few": {...}, ...}``.

For each number of rows that a graph knows: the kinds of operations that compute the
gradient of the rows, and the largest relative errors of the gradients.
"""

from __future__ import annotations

import json

import keras  # noqa: F401 - installs the hooks
import numpy as np
import tensorflow as tf

KNOWN = {"few": 8, "many": 300, "unknown": None}
rng = np.random.default_rng(2)
matrix = tf.constant(rng.normal(size=(600, 512)), tf.float32)


def error(found, expected):
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def of(count):
    """What becomes of the gradients for so many rows; None: the graph knows none."""

    @tf.function(input_signature=[tf.TensorSpec([count, 600])])
    def gradients(rows):
        with tf.GradientTape() as outer:
            outer.watch([rows, matrix])
            with tf.GradientTape() as tape:
                tape.watch([rows, matrix])
                loss = tf.reduce_sum((rows @ matrix) ** 3)
            of_rows, of_matrix = tape.gradient(loss, [rows, matrix])
        return of_rows, of_matrix, outer.gradient(of_rows, rows)

    errors: list[float] = []
    for number in (8, 300) if count is None else (count,):
        rows = tf.constant(rng.normal(size=(number, 600)), tf.float32)
        product = rows.numpy() @ matrix.numpy()
        expected = (
            3 * product**2 @ matrix.numpy().T,
            rows.numpy().T @ (3 * product**2),
            6 * (product * matrix.numpy().sum(axis=0)) @ matrix.numpy().T,
        )
        found = [each.numpy() for each in gradients(rows)]
        errors += map(error, found, expected)
    operations = gradients.get_concrete_function().graph.get_operations()
    copies = [
        op
        for op in operations
        if op.type == "MatMul"
        and op.get_attr("transpose_b")
        and op.inputs[1].shape == matrix.shape
    ]
    chosen = [op for op in operations if op.type in ("If", "StatelessIf")]
    return {
        "copies": len(copies),
        "conditionals": len(chosen),
        "largest_error": max(errors),
    }


if __name__ == "__main__":
    print(json.dumps({name: of(count) for name, count in KNOWN.items()}))

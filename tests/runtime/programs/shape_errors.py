"""Checks which shape errors are attributed to the division of batches."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from tests.runtime.programs import checks
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.checks import op_replay
from tfcluster.runtime.keras.checks.shape_errors import explained, is_about_shapes

OURS = Path(op_replay.__file__)


def failed(file: Path) -> tf.errors.OpError:
    """The error of an operation that was added at line 136 of a file."""
    text = f"""Graph execution error:

Detected at node Reshape defined at (most recent call last):
  File "{Path(__file__)}", line 3, in step

  File "{file}", line 136, in run

Input to reshape is a tensor with 16 values, but the requested shape has 32
"""
    return tf.errors.InvalidArgumentError(None, None, text)


def check_an_operation_of_the_program_is_explained() -> None:
    error = failed(Path(__file__))
    assert is_about_shapes(error)
    text = explained(error)
    assert "shape_errors.py:136: this fails on a part of a batch" in text
    assert "Input to reshape is a tensor with 16 values" in text


def check_an_operation_that_tfcluster_has_added_is_not() -> None:
    assert not is_about_shapes(failed(OURS))


def check_other_errors_are_not() -> None:
    for error in (
        ValueError("learning_rate should be float"),
        OSError("no such shape file"),
        CollectiveError("ranks have other shapes"),
    ):
        assert not is_about_shapes(error)


if __name__ == "__main__":
    checks.run(globals())

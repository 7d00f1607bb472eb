"""Restricts printing and ``tf.summary`` files to the chief.

``runtime.chief_only`` selects which. Neither TensorFlow nor Keras is imported before it
is needed.
"""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

from tfcluster.runtime.context import Context


def silence_print(context: Context) -> None:
    """Make ``print`` do nothing on other ranks, except to files.

    All ranks still write errors, warnings and what they log.
    """
    if context.is_chief or "print" not in context.options.chief_only:
        return
    original = builtins.print

    @functools.wraps(original)
    def silent(*values: Any, file: Any = None, **kwargs: Any) -> None:
        if file not in (None, sys.stdout, sys.stderr):
            original(*values, file=file, **kwargs)

    builtins.print = silent


def without_summaries(context: Context) -> None:
    """Make ``tf.summary`` write event files on the chief only."""
    if context.is_chief or "summary" not in context.options.chief_only:
        return
    import tensorflow as tf

    def no_writer(*args: Any, **kwargs: Any) -> Any:
        return tf.summary.create_noop_writer()

    original = tf.summary.create_file_writer
    for module in (tf.summary, tf.compat.v2.summary):
        module.create_file_writer = functools.wraps(original)(no_writer)

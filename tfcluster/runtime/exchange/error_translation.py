"""Errors of an exchange within an op: TensorFlow makes text of what Python raises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.keras import patches
from tfcluster.runtime.process_group import group, is_initialized


@functools.cache
def raise_our_errors() -> None:
    """Have every ``tf.function`` raise the error of an exchange in it as it is."""
    patches.TABLE.install({patches.FUNCTION_CALL: _call})


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with translated():
        return original(*args, **kwargs)


@contextmanager
def translated() -> Iterator[None]:
    """Raise the error of an exchange where TensorFlow has made text of it."""
    try:
        yield
    except Exception as error:
        # AutoGraph does so with what is raised while it traces a function.
        as_text = isinstance(error, tf.errors.OpError) or tf_internals.is_of_autograph(
            error
        )
        known = as_text and is_initialized()
        found = group().error_in(str(error)) if known else None
        if found is None:
            raise
        raise found from error


# Before any tf.function is called that has an exchange in it: a call that has begun is
# not changed any more.
raise_our_errors()

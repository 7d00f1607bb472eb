"""Restores our errors: TensorFlow turns a Python error inside an op into text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.process_group import group, is_initialized


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with translated():
        return original(*args, **kwargs)


@contextmanager
def translated() -> Iterator[None]:
    """A context that raises an exchange's original error instead of TensorFlow's.

    Raises the CollectiveError from the ``tf.errors.OpError``; any other error is passed
    on.
    """
    try:
        yield
    except Exception as error:
        # AutoGraph turns errors into text while it traces a function.
        as_text = isinstance(error, tf.errors.OpError) or tf_internals.is_of_autograph(
            error
        )
        from_tensorflow = as_text and is_initialized()
        original = group().error_in(str(error)) if from_tensorflow else None
        if original is None:
            raise
        raise original from error


def install() -> None:
    """Patch ``tf.function`` so that the caller gets the original errors of exchanges.

    Raises CollectiveError if TensorFlow lacks something that exchanges need.
    """
    tf_internals.check()
    tf_patches.TABLE.install(
        {tf_patches.FUNCTION_CALL: _call}, HandlerPlace.LAST, always=True
    )


# Install before any tf.function with an exchange is called: this does not affect a call
# in progress.
install()

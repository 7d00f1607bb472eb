"""Explains shape errors that are caused by dividing batches among the ranks.

A program with a hard-coded batch size works alone, but fails with a part of a batch.
TensorFlow's error does not say that the batch was divided.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.program_lines import is_of_the_user, is_ours, shown
from tfcluster.runtime.keras.session import Session

_ABOUT_SHAPES = re.compile(
    r"shape|dimension|broadcast|must (be equal|match)|batch.?size", re.IGNORECASE
)
_KINDS = (ValueError, TypeError, tf.errors.InvalidArgumentError)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ABOUT_PLACES = re.compile(r'File "[^"]+", line \d+|^Detected at node ')
_MARKS = re.compile(r"\x1b\[\d*m")
_LONGEST = 300
_ADVICE = (
    "Each rank gets only some rows of every batch. A program that hard-codes its batch "
    "size, as in Input(batch_shape=...), tf.reshape(x, (BATCH, ...)) or "
    "tf.zeros((BATCH, ...)), fails on them. Use tf.shape(x)[0] instead, and None in "
    "batch_shape. (If the program also fails on its own, this is not the cause.) With "
    "runtime: {batch: per_worker} batches are not divided; the program must then give "
    "each rank different data"
)


class ShapeErrors:
    """Explains errors about shapes that occur after batches have been divided."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._divides = session.divides and session.size > 1

    def install(self) -> None:
        """Explain an error that ends the program in the middle of a loop."""
        if not self._divides:
            return
        shows = sys.excepthook

        def show(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
        ) -> None:
            shows(kind, error, trace)
            if self._session.loop.divided and is_about_shapes(error):
                sys.stderr.write(f"tfcluster: {explained(error)}\n")

        sys.excepthook = show

    @contextmanager
    def in_fit(self) -> Iterator[None]:
        """A context in which Keras trains or evaluates on parts of batches.

        Raises CollectiveError instead of an error about shapes.
        """
        self._session.has_divided = False
        with self._explaining(lambda: self._session.has_divided):
            yield

    @contextmanager
    def in_function(self) -> Iterator[None]:
        """A context in which a ``tf.function`` is called.

        Raises CollectiveError instead of an error about shapes in loops whose batches
        are divided.
        """
        session = self._session
        outermost = tf.executing_eagerly() and not session.inside_keras
        with self._explaining(lambda: outermost and session.loop.divided):
            yield

    @contextmanager
    def _explaining(self, divided: Callable[[], bool]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not (self._divides and divided() and is_about_shapes(error)):
                raise
            raise CollectiveError(explained(error)) from None


def is_about_shapes(error: BaseException) -> bool:
    """Whether TensorFlow or Keras complains about the shapes of tensors."""
    known = tf_internals.is_of_autograph(error) or isinstance(error, _KINDS)
    return (
        known
        and not isinstance(error, CollectiveError)
        and bool(_ABOUT_SHAPES.search(str(error)))
        and not _is_of_ours(error)
    )


def _is_of_ours(error: BaseException) -> bool:
    """Whether the operation that failed was added by tfcluster, not by the program."""
    frames = [name for name, _ in _FRAME.findall(str(error))]
    return bool(frames) and is_ours(frames[-1])


def explained(error: BaseException) -> str:
    """A message that says what failed, where, and how to change the program."""
    where = _line_of(error)
    place = f"{where}: " if where else ""
    return f"{place}this fails on a part of a batch: {_said(error)}. {_ADVICE}"


def _said(error: BaseException) -> str:
    """The line of an error's text that is about shapes."""
    lines = [line.strip() for line in _MARKS.sub("", str(error)).splitlines()]
    about = [
        line
        for line in lines
        if _ABOUT_SHAPES.search(line) and not _ABOUT_PLACES.search(line)
    ]
    return (about or lines)[0][:_LONGEST].rstrip(".")


def _line_of(error: BaseException) -> str:
    """``FILE:LINE`` of the innermost line of the program that led to the error."""
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    # For functions, AutoGraph and TensorFlow put the lines in the error's text.
    frames += [(name, int(line)) for name, line in _FRAME.findall(str(error))]
    for name, line in reversed(frames):
        if Path(name).is_file() and is_of_the_user(name):
            return f"{shown(Path(name))}:{line}"
    return ""

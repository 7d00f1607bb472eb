"""Where in the user's program we were called from, for messages."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

import tfcluster
from tfcluster.runtime import tf_internals

_LIBRARIES = tuple(
    f"{Path(str(package.__file__)).resolve().parent}/"
    for package in (keras, tf, tfcluster)
)
_OURS = f"{Path(tfcluster.__file__).resolve().parent}/"


def user_line() -> str:
    """``FILE:LINE`` of the innermost call in the user's program.

    Code that AutoGraph has generated counts as the code it was generated from.
    """
    for frame in reversed(tf_internals.user_frames()):
        if is_of_the_user(frame.filename):
            return f"{shown(Path(frame.filename))}:{frame.lineno}"
    return "the program"


def is_of_the_user(file: str) -> bool:
    """Whether code in ``file`` belongs neither to us nor to Keras or TensorFlow."""
    generated = tf_internals.is_generated(file) or file.startswith("<")
    return not generated and not str(Path(file).resolve()).startswith(_LIBRARIES)


def is_ours(file: str) -> bool:
    """Whether code in ``file`` belongs to tfcluster."""
    return str(Path(file).resolve()).startswith(_OURS)


def shown(path: Path) -> Path:
    """Relative to the working directory where the file is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

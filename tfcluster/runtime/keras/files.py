"""Only the chief writes files; the others wait until it has.

So that a later load finds a finished file on every rank, and so that an error while
writing is an error on all of them.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import saving_api
from keras.src.utils import file_utils, io_utils

from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.wrapping import wrap

_SAVERS = ("save_model", "save_weights")


class Files:
    """The hooks on everything of Keras's that saves."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self) -> None:
        for name in _SAVERS:
            original = getattr(saving_api, name)
            wrap(saving_api, name, self._by_the_chief)
            _replace_everywhere(original, getattr(saving_api, name))
        wrap(keras.Model, "export", self._by_the_chief)
        wrap(tf.train.Checkpoint, "write", self._by_the_chief)
        wrap(tf.train.Checkpoint, "save", self._by_the_chief)
        wrap(tf.train.CheckpointManager, "save", self._by_the_chief)
        wrap(tf.saved_model, "save", self._by_the_chief)
        wrap(file_utils, "makedirs", _make_once)
        if not self._session.chief:
            wrap(io_utils, "print_msg", _say_nothing)

    def chief_only(self, act: Callable[[], Any], what: str) -> Any:
        """Have the chief ``act``; all ranks return what it returned, if it is text.

        Raises on every rank what it raised, or what is nearest to it.
        """
        session = self._session
        if session.within("saving"):
            return act()
        session.settle(what)
        error: Exception | None = None
        result: Any = None
        if session.chief:
            try:
                with session.once("saving"):
                    result = act()
            except Exception as raised:
                error = raised
        text = result if isinstance(result, str) else None
        outcome = [type(error).__name__, str(error)] if error else ["", text]
        kind, text = json.loads(session.agreed(json.dumps(outcome), what))
        if error is not None:
            raise error
        if kind:
            raise _likeness(kind, f"the chief could not save: {text}")
        return result if session.chief else text

    def _by_the_chief(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return self.chief_only(
            lambda: original(*args, **kwargs), f"end of {original.__name__}"
        )


def _likeness(kind: str, text: str) -> Exception:
    """An exception of the same built-in class, so that the same handler takes it."""
    cls = getattr(builtins, kind, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        with contextlib.suppress(TypeError):
            return cls(text)
    return RuntimeError(f"{text} ({kind})")


def _make_once(original: Callable[..., Any], path: Any) -> Any:
    """Several ranks may make the same folder at the same time."""
    try:
        return original(path)
    except FileExistsError:
        if not Path(path).is_dir():
            raise
    return None


def _say_nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The chief says it already."""


def _replace_everywhere(old: Any, new: Any) -> None:
    """Keras offers one function under many names."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "keras":
            continue
        for attribute in _SAVERS:
            if vars(module).get(attribute) is old:
                setattr(module, attribute, new)

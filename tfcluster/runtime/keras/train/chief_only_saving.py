"""Only the chief writes files; the others wait until it has.

So that a later load finds a finished file on every rank, and so that an error while
writing is an error on all of them.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import saving_api
from keras.src.utils import file_utils, io_utils

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, broadcast_bytes
from tfcluster.runtime.keras.data import cache_files
from tfcluster.runtime.keras.data.downloads import Downloads
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.saved_copies import (
    MAX_BYTES,
    Saved,
    described,
    link,
    packed,
    unpack,
)
from tfcluster.runtime.patching import Around, replace_everywhere, wrap
from tfcluster.runtime.process_group import context
from tfcluster.runtime.scripts import chief_only_output

_SAVERS = ("save_model", "save_weights")


@dataclass(frozen=True, slots=True)
class Name:
    """What a rank calls that which is saved."""

    given: str
    """As the program has it, which may be relative."""
    prefix: bool = False
    """All files that begin so, and not one file or folder."""

    @property
    def path(self) -> str:
        return str(Path(self.given).absolute())


class ChiefOnlySaving:
    """The hooks on everything of Keras's that saves."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self) -> None:
        for name in _SAVERS:
            original = getattr(saving_api, name)
            wrap(saving_api, name, self._saved_as("filepath"))
            replace_everywhere(name, original, getattr(saving_api, name))
        wrap(keras.Model, "export", self._saved_as("filepath"))
        wrap(tf.train.Checkpoint, "write", self._saved_as("file_prefix", prefix=True))
        wrap(tf.train.Checkpoint, "save", self._saved_as("file_prefix", prefix=True))
        wrap(tf.train.CheckpointManager, "save", self._save_of_manager)
        wrap(tf.saved_model, "save", self._saved_as("export_dir"))
        wrap(tf.data.Dataset, "save", self._saved_as("path"))
        chief_only_output.without_summaries(context())
        cache_files.install(context().rank)
        Downloads(context()).install()
        wrap(file_utils, "makedirs", _make_once)
        if not self._session.chief:
            wrap(io_utils, "print_msg", _say_nothing)

    def chief_only(
        self, act: Callable[[], Any], what: str, name: Name | None = None
    ) -> Any:
        """Have the chief ``act``; all ranks return what it returned, if it is text.

        Raises on every rank what it raised, or what is nearest to it. Those that have
        another ``name`` for what is saved find it there.
        """
        session = self._session
        if session.within("saving"):
            return act()
        session.settle(what)
        began = time.time()
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
        names = [name.path, name.given] if name else ["", ""]
        ours = json.dumps([*names, *outcome]).encode()
        sent = allgather_bytes(session.group, ours, Signature(what))
        paths = {json.loads(data)[0] for data in sent}
        chiefs, given, kind, text = json.loads(sent[0])
        if error is not None:
            raise error
        if kind:
            raise _likeness(kind, f"the chief could not save: {text}")
        if name and len(paths) > 1 and "" not in paths:
            self._share(name, chiefs, began, what)
            if text and text.startswith(given):
                text = name.given + text.removeprefix(given)
        return result if session.chief else text

    def _share(self, name: Name, chiefs: str, began: float, what: str) -> None:
        """Have what the chief has saved under every rank's own name for it."""
        session = self._session
        found = None
        if session.chief:
            found = described(chiefs, prefix=name.prefix, since=began)
        words = json.dumps(found.as_words() if found else None)
        saved = json.loads(session.agreed(words, f"{what}: its files"))
        if saved is None:
            return
        files = Saved.of_words(saved)
        lacks = b""
        if name.path != chiefs:
            if files.is_here():
                link(files, name.path)
            else:
                lacks = b"1"
        signature = Signature(f"{what}: who lacks the files")
        if not any(allgather_bytes(session.group, lacks, signature)):
            return
        if files.bytes > MAX_BYTES:
            session.warn(
                f"{chiefs} is not visible on all hosts and too large to send: it is "
                f"missing on ranks that use another name for it ({name.path})"
            )
            return
        data = packed(files) if session.chief else b""
        data = broadcast_bytes(session.group, data, 0, Signature(f"{what}: the files"))
        if lacks:
            unpack(files, data, name.path)

    def _saved_as(self, argument: str, *, prefix: bool = False) -> Around:
        """Around a function whose ``argument`` is the path that it saves to."""

        def saved(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                call = inspect.signature(original).bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # It has the words for it.
            path: Any = call.arguments.get(argument)
            return self.chief_only(
                lambda: original(*args, **kwargs),
                f"end of {original.__name__}",
                Name(str(path), prefix) if _is_local(path) else None,
            )

        return saved

    def _save_of_manager(
        self, original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = manager._prefix  # Folder and name.
        name = Name(given, prefix=True) if _is_local(given) else None
        saved = self.chief_only(
            lambda: original(manager, *args, **kwargs), "end of save", name
        )
        if saved and not self._session.chief and not self._session.within("saving"):
            # What it would know if it had saved that itself.
            manager._latest_checkpoint = saved
            manager._maybe_delete[saved] = time.time()
        return saved


def _is_local(path: Any) -> bool:
    """A path of this machine's files, and no open file or URL."""
    return isinstance(path, str | os.PathLike) and "://" not in str(os.fspath(path))


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

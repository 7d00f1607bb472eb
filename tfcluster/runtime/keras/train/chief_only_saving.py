"""Only the chief writes files; the other ranks wait for it.

So every rank that loads a file later finds it complete, and an error while writing is
raised on all ranks. Where the other ranks have layers for their files, they write the
same files there.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, broadcast_bytes
from tfcluster.runtime.contract import Around
from tfcluster.runtime.files import private_files
from tfcluster.runtime.files.saved_copies import (
    MAX_BYTES,
    Saved,
    described,
    link,
    packed,
    unpack,
)
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.downloads import Downloads
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Callback
from tfcluster.runtime.process_group import context
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.tensor_types import Dataset, Tensor

T = TypeVar("T")
_File = str | os.PathLike[str] | Tensor | None
"""A path as ``tf.data`` takes it; a tensor is a scalar string."""


@dataclass(frozen=True, slots=True)
class RankPath:
    """A rank's own path for saved files."""

    text: str
    """The path as the program gives it; may be relative."""
    prefix: bool = False
    """Whether the path is a prefix of several files rather than one file or folder."""

    @property
    def path(self) -> str:
        """The absolute path."""
        return str(Path(self.text).absolute())


class ChiefOnlySaving:
    """The hooks on everything in Keras that saves."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process.

        On ranks other than the chief, Keras prints nothing, and nobody sees event files
        if the option ``chief_only`` has ``summary``.
        """
        file = self._saved_as("filepath")
        prefix = self._saved_as("file_prefix", prefix=True)
        patches.TABLE.install(
            {
                patches.SAVE_MODEL: file,
                patches.SAVE_WEIGHTS: file,
                patches.MODEL_EXPORT: file,
                patches.BACKUP_SAVE: self._by_the_chief,
                patches.BACKUP_TRAIN_END: self._by_the_chief,
            }
        )
        if not private_files.are_private():
            patches.TABLE.install({patches.MAKEDIRS: _make_once})
        tf_patches.TABLE.install(
            {
                tf_patches.CHECKPOINT_WRITE: prefix,
                tf_patches.CHECKPOINT_SAVE: self._save_of_checkpoint,
                tf_patches.MANAGER_SAVE: self._save_of_manager,
                tf_patches.SAVED_MODEL_SAVE: self._saved_as("export_dir"),
                tf_patches.DATASET_SAVE: self._saved_as("path"),
            }
        )
        if not context().is_chief and "summary" in context().options.chief_only:
            tf_patches.TABLE.install(
                {
                    tf_patches.SUMMARY_WRITER: _own_writer,
                },
                always=True,
            )
        if context().rank:
            # Two processes that write the same file would disturb each other.
            own = partial(_of_this_rank, f".rank{context().rank}")
            tf_patches.TABLE.install(
                {tf_patches.DATASET_CACHE: own, tf_patches.DATASET_SNAPSHOT: own}
            )
        Downloads(context()).install()
        if not self._session.chief:
            patches.TABLE.install({patches.PRINT_MSG: _print_captured})

    def chief_only(
        self, act: Callable[[], T], what: str, name: RankPath | None = None
    ) -> T | str | None:
        """Call ``act`` on the chief. All ranks must call this.

        Returns the result of ``act`` on the chief. The other ranks return the same
        result if it is a string, else None. If ``act`` raises, every other rank raises
        an exception of the same built-in class, or a RuntimeError. Ranks whose ``name``
        differs find the files under their own name. Raises OSError if the files cannot
        be copied there, and what ``settle`` and ``Group.exchange`` raise.
        """
        if self._session.within("saving"):
            return act()
        with SIGNALS:
            return self._chief_only(act, what, name)

    def _chief_only(
        self, act: Callable[[], T], what: str, name: RankPath | None
    ) -> T | str | None:
        session = self._session
        session.settle(what)
        began = time.time()
        error: Exception | None = None
        result: T | None = None
        tables = session.tables
        everywhere = name is not None and private_files.are_private()
        if session.chief or everywhere:
            path = name.path if name and everywhere else None
            leading = (
                contextlib.nullcontext()
                if everywhere or not tables
                else tables.leading()
            )
            try:
                with (
                    leading,
                    session.saving(what),
                    SIGNALS.held(),
                    private_files.saving(path),
                ):
                    result = act()
            except Exception as raised:
                error = raised
        elif tables is not None:
            tables.serve()
        text = result if isinstance(result, str) else None
        outcome = [type(error).__name__, str(error)] if error else ["", text]
        names = [name.path, name.text] if name else ["", ""]
        ours = json.dumps([*names, *outcome]).encode()
        sent = allgather_bytes(session.group, ours, Signature(what))
        paths = {json.loads(data)[0] for data in sent}
        chiefs, prefix, kind, text = json.loads(sent[0])
        if error is not None:
            raise error
        if kind:
            raise _same_exception(kind, f"the chief could not save: {text}")
        if everywhere:
            return result
        if name and len(paths) > 1 and "" not in paths:
            self._share(name, chiefs, began, what)
            if text and text.startswith(prefix):
                text = name.text + text.removeprefix(prefix)
        return result if session.chief else cast("str | None", text)

    def wait_for(self, path: object, what: str) -> None:
        """Wait until the chief gets here; then its file ``path`` is complete.

        All ranks must call this. Ranks with another ``path`` find the file there.
        Raises what ``chief_only`` raises.
        """
        self.chief_only(lambda: None, what, _named(path))

    def _share(self, name: RankPath, chiefs: str, began: float, what: str) -> None:
        """Make the chief's files available under every rank's own name."""
        session = self._session
        described_files = None
        if session.chief:
            described_files = described(chiefs, prefix=name.prefix, since=began)
        text = json.dumps(described_files.as_words() if described_files else None)
        saved = json.loads(session.agreed(text, f"{what}: its files"))
        if saved is None:
            return
        files = Saved.of_words(saved)
        missing = b""
        if name.path != chiefs:
            if files.is_here():
                link(files, name.path)
            else:
                missing = b"1"
        signature = Signature(f"{what}: who lacks the files")
        if not any(allgather_bytes(session.group, missing, signature)):
            return
        if files.bytes > MAX_BYTES:
            session.warn(
                f"{chiefs} is not visible on all hosts and too large to send: it is "
                f"missing on ranks that use another name for it ({name.path})"
            )
            return
        data = packed(files) if session.chief else b""
        data = broadcast_bytes(session.group, data, 0, Signature(f"{what}: the files"))
        if missing:
            unpack(files, data, name.path)

    def _saved_as(self, argument: str, *, prefix: bool = False) -> Around:
        """Wrap a function whose ``argument`` is the path that it saves to."""

        def saved(original: Callable[..., object], *args: Any, **kwargs: Any) -> object:
            try:
                call = inspect.signature(original).bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # Reports the wrong arguments.
            path = call.arguments.get(argument)
            return self.chief_only(
                lambda: original(*args, **kwargs),
                f"end of {original.__name__}",
                _named(path, prefix=prefix),
            )

        return saved

    def _by_the_chief(
        self,
        original: Callable[..., None],
        callback: Callback,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Call a method of a callback that changes files."""
        name = None
        # Without layers, every rank reads the chief's folder.
        if private_files.are_private():
            name = _named(getattr(callback, "backup_dir", None))
        self.chief_only(
            lambda: original(callback, *args, **kwargs),
            f"end of {type(callback).__name__}",
            name,
        )

    def _save_of_checkpoint(
        self, original: Callable[..., str], checkpoint: Any, *args: Any, **kwargs: Any
    ) -> object:
        saved = self._saved_as("file_prefix", prefix=True)
        path = saved(original, checkpoint, *args, **kwargs)
        self._count_save(checkpoint)
        return path

    def _count_save(self, checkpoint: Any) -> None:
        """Count a save on a rank that wrote nothing: it is part of the state."""
        if self._has_skipped and tf.executing_eagerly():
            checkpoint.save_counter.assign_add(1)

    @property
    def _has_skipped(self) -> bool:
        """Whether this rank has not executed what it was to save."""
        session = self._session
        skips = not session.chief and not private_files.are_private()
        return skips and not session.within("saving")

    def _save_of_manager(
        self,
        original: Callable[..., str | None],
        manager: tf_internals.CheckpointManager,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        # The prefix is the folder and the beginning of the files' names.
        name = _named(tf_internals.prefix_of(manager), prefix=True)
        saved = self.chief_only(
            lambda: original(manager, *args, **kwargs), "end of save", name
        )
        if saved and self._has_skipped:
            # The manager gets the state that it would have after saving a checkpoint.
            with contextlib.suppress(tf.errors.NotFoundError):
                # Another rank may delete the same file at the same time.
                tf_internals.note_checkpoint(manager, saved, time.time())
            self._count_save(manager.checkpoint)
        return saved


def _named(path: object, *, prefix: bool = False) -> RankPath | None:
    """This rank's path; None if it is an open file or a URL."""
    if not isinstance(path, str | os.PathLike) or "://" in str(os.fspath(path)):
        return None
    return RankPath(str(path), prefix)


def _same_exception(kind: str, text: str) -> Exception:
    """An exception of the same built-in class, so that the same handler catches it."""
    cls = getattr(builtins, kind, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        with contextlib.suppress(TypeError):
            return cls(text)
    return RuntimeError(f"{text} ({kind})")


def _make_once(original: Callable[[str], None], path: str) -> None:
    """Create a folder that another rank may be creating at the same time."""
    try:
        original(path)
    except FileExistsError:
        if not Path(path).is_dir():
            raise


def _own_writer(
    original: Callable[..., object], logdir: _File | None, *args: Any, **kwargs: Any
) -> object:
    """Write event files that nobody sees, or none: only the chief's count.

    With a writer, functions have the same ops as on the chief. A folder that cannot be
    made is an error here as well.
    """
    if logdir is None:
        return original(logdir, *args, **kwargs)
    if not private_files.are_private():
        return tf.summary.create_noop_writer()
    if not isinstance(logdir, tf.Tensor):
        tf.io.gfile.makedirs(logdir)
    return original(str(Path(_EVENTS).absolute()), *args, **kwargs)


_EVENTS = ".tfcluster-events"
"""A folder in a rank's own layer over the working directory."""


def _print_captured(original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Print only what the program captures: the chief prints the rest for all."""
    if sys.stdout is not sys.__stdout__:
        original(*args, **kwargs)


def _of_this_rank(
    ending: str,
    original: Callable[..., Dataset],
    dataset: Dataset,
    path: _File = "",
    *args: Any,
    **kwargs: Any,
) -> Dataset:
    """Cache a dataset next to the chief's file, or take a snapshot there."""
    # ``cache`` calls it a filename.
    path = kwargs.pop("filename", path)
    return original(dataset, _with(ending, path), *args, **kwargs)


def _with(ending: str, path: _File) -> _File:
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        # Without a name the cache is in memory.
        return f"{text.rstrip('/')}{ending}" if text else path
    if path is None:
        return path
    tensor = tf.convert_to_tensor(path)
    return tf.where(tf.strings.length(tensor) > 0, tensor + ending, tensor)

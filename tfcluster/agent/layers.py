"""Clears away the layers into which ranks other than the chief have written.

Most files equal the chief's, and are dropped. The others are moved to the run's folder
on this host. ``tfcluster.runtime.files.layers`` makes the layers.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress

from tfcluster.agent.run_services import RunServices
from tfcluster.agent.task import AgentTask
from tfcluster.protocol.messages import Note

VARIABLE = "TFCLUSTER_FILES"
RANK = "TFCLUSTER_RANK"
_LISTED = ".layers"
_SAVED = ".saved"
_SHOWN = 3
_OF_ONE_RANK = re.compile(r"/__pycache__/|/events\.out\.tfevents\.|\.rank\d+(_|/|\.|$)")
"""Files that each rank has under its own name, or that need not be equal."""
_CHECKPOINTS = "checkpoint"
"""TensorFlow's list of the checkpoints in a folder; it has times in it."""


class LayerRemover:
    """Clears away the layers of a host when all of its ranks have ended."""

    def __init__(self, shared: RunServices, tasks: Collection[AgentTask]) -> None:
        self._shared = shared
        self._tasks = tasks
        self._running = 0
        self._failed = False
        self._ranks: set[str] = set()
        """Those that have ended; a second agent may have others on this host."""

    @property
    def over(self) -> bool:
        return not self._running

    def starts(self, task: AgentTask) -> None:
        """Make the folder, by which a rank in a container sees that it is shared."""
        if folder := task.request.env.get(VARIABLE):
            with suppress(OSError):
                os.makedirs(folder, 0o700, exist_ok=True)

    def settled(self, task: AgentTask) -> None:
        """Note an end; the last rank's end clears away all layers.

        If a rank has failed, only files that the chief does not have are kept then.
        """
        folder = task.request.env.get(VARIABLE)
        if folder is None:
            return
        self._failed |= task.status != 0
        self._ranks.add(task.request.env.get(RANK) or "")
        if self._is_used():
            return
        ended_well, self._failed = not self._failed, False
        ranks, self._ranks = self._ranks, set()
        if not os.path.isdir(folder):
            return
        attempt = task.request.attempt
        self._running += 1

        def clear() -> None:
            text = None
            try:
                text = _clear(folder, attempt, ranks, ended_well=ended_well)
            except OSError as error:
                text = f"the files of ranks in {folder} cannot be cleared away: {error}"
            finally:
                self._shared.loop.post(lambda: self._cleared(folder, text))

        threading.Thread(target=clear, name="layers").start()

    def _is_used(self) -> bool:
        return any(
            VARIABLE in task.request.env and not task.settled for task in self._tasks
        )

    def _cleared(self, folder: str, text: str | None) -> None:
        self._running -= 1
        if not self._is_used():
            with suppress(OSError):
                os.rmdir(folder)  # unless something is kept
        if text is not None:
            self._shared.channel.send(Note(text))


def _clear(
    folder: str, attempt: int, ranks: Collection[str], *, ended_well: bool
) -> str | None:
    kept: list[str] = []
    ended = {f"{name}-{attempt}" for name in (*ranks, "order", "written")}
    names = [
        name for name in sorted(os.listdir(folder)) if name.partition(".")[0] in ended
    ]
    for name in names:
        if name.endswith(_LISTED):
            own = os.path.join(folder, name[: -len(_LISTED)])
            saved = _lines(own + _SAVED)
            target = os.path.join(folder, f"rank-{name.partition('-')[0]}")
            for line in _lines(own + _LISTED):
                files, under = json.loads(line)
                kept += _settle(files, under, saved, target, ended_well)
                _remove(os.path.dirname(os.path.dirname(files)))
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            os.unlink(path)
        else:
            _remove(path)
    if not kept:
        return None
    paths = list(dict.fromkeys(kept))
    shown = ", ".join(paths[:_SHOWN])
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (
        f"ranks other than the chief have written other files than the chief: {shown}"
        f"{more}; they are kept in {folder}"
    )


def _settle(
    files: str, under: str, saved: list[str], target: str, ended_well: bool
) -> Iterator[str]:
    for path in _files_in(files):
        real = os.path.join(under, os.path.relpath(path, files))
        if (
            _OF_ONE_RANK.search(real)
            or _is_saved(real, saved)
            or (not ended_well and os.path.lexists(real))
            or _are_equal(path, real)
        ):
            continue
        kept = target + real
        os.makedirs(os.path.dirname(kept), mode=0o700, exist_ok=True)
        import shutil  # only here and below: it takes long to import

        shutil.move(path, kept)
        yield real


def _files_in(folder: str) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            mode = os.lstat(path).st_mode
            # A device stands for a file that is removed.
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                yield path


def _is_saved(path: str, saved: list[str]) -> bool:
    """Whether the runtime has let every rank save this file, or one of its name."""
    if os.path.basename(path) == _CHECKPOINTS:
        return os.path.dirname(path) in map(os.path.dirname, saved)
    return path.startswith(tuple(saved))


def _are_equal(path: str, real: str) -> bool:
    try:
        if os.path.islink(path):
            return os.readlink(path) == os.readlink(real)
        return filecmp.cmp(path, real, shallow=False) or _have_equal_members(path, real)
    except OSError:
        return False


def _have_equal_members(path: str, real: str) -> bool:
    """Whether two files are archives that differ only in the times of their members."""
    import zipfile  # only here: it takes long to import

    contents = []
    for name in (path, real):
        try:
            with zipfile.ZipFile(name) as archive:
                members = archive.infolist()
        except zipfile.BadZipFile:
            return False
        contents.append([(m.filename, m.CRC, m.file_size) for m in members])
    return contents[0] == contents[1]


def _lines(path: str) -> list[str]:
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _remove(folder: str) -> None:
    for where, names, _ in os.walk(folder):
        for name in names:
            with suppress(OSError):
                os.chmod(os.path.join(where, name), 0o700)
    import shutil

    shutil.rmtree(folder, ignore_errors=True)

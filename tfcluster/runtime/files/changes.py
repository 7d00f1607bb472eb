"""Puts each rank but the chief into its own layer, and orders the changes of files."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfcluster.runtime.files.events import (
    EVENTS,
    Change,
    change_of,
    is_shared,
    program_line,
)
from tfcluster.runtime.files.layers import Layers, is_below
from tfcluster.runtime.files.order import Order
from tfcluster.runtime.telemetry.agent_channel import reporter

_COMMAND = "subprocess.Popen"
"""A command that may run after Python's function has returned."""
_OF_A_FOLDER = ("os.rename", "os.rmdir")
_REMOVALS = (*_OF_A_FOLDER, "os.remove", "shutil.rmtree")
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Changes:
    """The audit hook, which Python calls before each change.

    ``layers`` are None on the chief. ``work`` is the program's folder, without links.
    Paths that the runtime lets every rank save are written to the file ``saved``.
    """

    def __init__(
        self, order: Order, layers: Layers | None, work: str, saved: str
    ) -> None:
        self._order = order
        self._layers = layers
        self._work = work
        self._saved = saved
        self._process = os.getpid()
        self._is_ordered = True
        self._thread = threading.local()
        self._inside = False
        """Whether the main thread is in ``hook``."""
        self._uncovered: set[str] = set()
        self._callback = _PENDING(self._returned)

    # --- the hook ---------------------------------------------------------------------

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        """Called before each change, and for many other events."""
        if event not in EVENTS or self._is_busy or os.getpid() != self._process:
            return
        is_here = self._order.is_here()
        self._thread.busy = True
        self._inside = is_here or self._inside
        try:
            with suppress(Exception):
                change = change_of(event, args, sys._getframe(1), self._work)
                if change is not None:
                    self._begin(change)
                    if event in _REMOVALS and is_here and self._layers is not None:
                        self._order.wait_for_first()
                    if event in _OF_A_FOLDER and self._layers is not None:
                        self._layers.release(change.paths[0])
                    if event == "os.rename" and self._layers is not None:
                        self._layers.make_movable(change.paths[0])
                    if is_here and event != _COMMAND:
                        self._call_when_returned()
        finally:
            self._thread.busy = False
            if is_here:
                # Last: from here, Python calls nothing until the change is made.
                self._inside = False

    @property
    def _is_busy(self) -> bool:
        return getattr(self._thread, "busy", False)

    def _begin(self, change: Change) -> None:
        """Wait until the change may be made."""
        if self._layers is not None:
            for path in change.paths:
                self._cover(self._layers, path)
        if not self._order.is_here():
            return
        self._order.done()
        self._order.count += 1
        if self._layers is None and self._is_ordered and not self._order.wait():
            self._is_ordered = False
            where = f"{change.line} " if change.line else ""
            _warn(
                f"{where}changes {change.what}, and another rank does not: from here "
                "on, a rank may see files that the chief has made before it"
            )

    def _cover(self, layers: Layers, path: str) -> None:
        folder = self._work
        if not is_below(path, folder):
            parents = (str(parent) for parent in Path(path).parents)
            folder = next(parent for parent in parents if os.path.isdir(parent))  # noqa: PTH112
        if folder in self._uncovered:
            return
        try:
            layers.cover(folder)
        except OSError as error:
            self._uncovered.add(folder)
            _warn(
                f"every rank writes to {folder}: a layer for the files of one rank "
                f"cannot be had there ({error.strerror})"
            )

    def leave(self) -> list[int]:
        """Undo what concerns this rank alone; see ``Order.leave``. Raises OSError."""
        self._thread.busy = True
        if self._layers is not None:
            self._layers.leave()
        Path(self._saved).unlink(missing_ok=True)
        return self._order.leave()

    # --- the end of a change ----------------------------------------------------------

    def _call_when_returned(self) -> None:
        """Have ``_returned`` called as soon as Python's function has made the change.

        There is no audit event for that. But Python runs what is pending, as it runs
        handlers of signals, between two instructions of the main thread.
        """
        if ctypes.pythonapi.Py_AddPendingCall(self._callback, None):
            self._order.done()  # too much is pending

    def _returned(self, _: object) -> int:
        if self._inside:
            self._call_when_returned()
        else:
            self._order.done()
        return 0

    def command_started(self, child: int | None) -> None:
        """Note the process of a command, if it could be started.

        The change has been made when it ends.
        """
        if not self._order.is_here():
            return
        if child is None:
            self._order.done()
        else:
            threading.Thread(
                target=self._wait_for, args=(child, self._order.count), daemon=True
            ).start()

    def _wait_for(self, child: int, number: int) -> None:
        """Wait for a process, unless the program changes something before."""
        with suppress(OSError):
            descriptor = os.pidfd_open(child)
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll()
            finally:
                os.close(descriptor)
        if self._order.count == number:
            self._order.done()

    # --- the runtime's own files ------------------------------------------------------

    @contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """A context in which all ranks save something to an absolute path.

        It is one change. What they save may differ in its time stamps.
        """
        if self._is_busy:
            yield
            return
        self._thread.busy = True
        head, tail = os.path.split(path.rstrip("/"))
        real = f"{os.path.realpath(head)}/{tail}"
        try:
            line = program_line(sys._getframe(2)) or ""
            paths = (real,) if is_shared(real, self._work) else ()
            self._begin(Change(paths, tail, line))
            if paths and self._layers is not None:
                with Path(self._saved).open("a") as file:
                    file.write(f"{real}\n")
            yield
        finally:
            self._thread.busy = False
            if self._order.is_here():
                self._order.done()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which this rank may change what the others do not."""
        before, self._thread.busy = self._is_busy, True
        try:
            yield
        finally:
            self._thread.busy = before


def _warn(text: str) -> None:
    reporter().warning(text)
    sys.stderr.write(f"tfcluster: warning: {text}\n")

"""Decides how the ranks of a host deal with files, before the program's first line."""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tfcluster.plan.model import Strategy
from tfcluster.runtime.context import Context
from tfcluster.runtime.files import opener, order
from tfcluster.runtime.files.changes import Changes
from tfcluster.runtime.files.layers import Layers, enter
from tfcluster.runtime.files.order import FOLDER, Order, path_in
from tfcluster.runtime.files.shared import SharedFiles
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.scripts.run_script import Script
from tfcluster.runtime.telemetry.agent_channel import reporter

_REFRESH_S = 1.0
"""How long a rank may not see what another process has done to its folders."""
FAILS = "TFCLUSTER_FILES_FAIL"
"""A variable for tests: no layer can be had."""

_private: Changes | None = None
_shared: SharedFiles | None = None


def install(program: Script, context: Context) -> None:
    """Give each rank of the host but the first its own layer, if the option says so.

    Must be called while the process has one thread. Where layers cannot be had, a rank
    warns of a file that another rank changes, too.
    """
    global _private, _shared
    folder = os.environ.get(FOLDER)
    if folder is None or _private or _shared or not _concerns(program, context):
        return
    if not os.path.isdir(folder):  # noqa: PTH112 - no path object is needed
        return  # each rank may be in a container of its own
    is_chief = context.local_rank == 0
    own = f"{folder}/{context.rank}-{context.attempt}"
    work = os.path.realpath(os.getcwd())  # noqa: PTH109 - the text is needed
    recording = context.recording.folder if context.recording else folder
    layers = Layers(own, (folder, recording))
    try:
        ranks = Order(
            path_in(folder, context.attempt), context.local_rank, context.local_size
        )
        able = is_chief or (FAILS not in os.environ and layers.can_cover(work))
        all_able = ranks.begin(is_able=able)
    except OSError as error:
        # The other ranks wait for this one.
        sys.exit(
            f"tfcluster: the ranks cannot agree on their files ({error}): set "
            "'runtime: {files: shared}', if that cannot be changed"
        )
    if not all_able:
        if context.options.files == "private" and not is_chief:
            _warn("runtime.files is 'private', but layers cannot be had on this host")
        _shared = SharedFiles(f"{folder}/written-{context.attempt}", context.rank, work)
        sys.addaudithook(_shared.hook)
        return
    if not is_chief:
        enter()
        layers.cover(work)
        # Not threading.Thread: it would appear among the program's threads.
        _thread.start_new_thread(_keep_fresh, (layers,))
    changes = Changes(ranks, None if is_chief else layers, work, f"{own}.saved")
    _private = changes
    order.set_current(ranks)
    atexit.register(ranks.end)
    sys.addaudithook(changes.hook)
    _watch_commands(changes)


def leave() -> tuple[list[int], dict[str, str]]:
    """Undo ``install``, before a new program follows in this process.

    Returns descriptors that must stay open, and variables that the program needs.
    Raises OSError. Changes that the chief has made remain.
    """
    if _private is None:
        return [], {}
    descriptors, variables = _private.leave(), {}
    if (helper := opener.descriptor()) is not None:
        descriptors.append(helper)
        variables[opener.KEPT] = str(helper)
    return descriptors, variables


def _keep_fresh(layers: Layers) -> None:
    """Let a program that waits for a file of another process see it."""
    while True:
        time.sleep(_REFRESH_S)
        layers.refresh()


def _watch_commands(changes: Changes) -> None:
    """Tell ``changes`` of the processes of commands: there is no audit event for it."""
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def started(popen: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        try:
            original(popen, *args, **kwargs)
        finally:
            changes.command_started(getattr(popen, "pid", None))

    vars_of_class: Any = subprocess.Popen
    vars_of_class.__init__ = started


def are_private() -> bool:
    """Whether every rank writes all files, those but the chief into a layer."""
    return _private is not None


def saving(path: str | None) -> AbstractContextManager[None]:
    """A context in which all ranks save ``path``, or only the chief something (None).

    See ``Changes.saving``.
    """
    if _private is None:
        return nullcontext()
    return _private.uncounted() if path is None else _private.saving(path)


def uncounted() -> AbstractContextManager[None]:
    """See ``Changes.uncounted``."""
    return nullcontext() if _private is None else _private.uncounted()


def cause_of(error: BaseException) -> str | None:
    """What other ranks may have to do with an error; None if nothing is known."""
    return None if _shared is None else _shared.cause_of(error)


def _concerns(program: Script, context: Context) -> bool:
    """Whether the ranks of this run change the same files in the same order."""
    options = context.options
    if not context.trains or context.size == 1 or not context.is_on_one_host:
        return False
    if options.files != "auto":
        return options.files == "private"
    synchronous = (
        context.strategy in (Strategy.COLLECTIVE, Strategy.REPLICATED)
        or context.options.synchronous
    )
    return synchronous and options.divides and not program_kind.knows_ranks(program)


def _warn(text: str) -> None:
    reporter().warning(text)
    sys.stderr.write(f"tfcluster: warning: {text}\n")

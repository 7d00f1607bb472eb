"""Runs a program for ``tfcluster explain``, until it has made one step of training.

``main`` gets the file for the answer, the number of ranks, and the program. It writes
no answer if the program fails, whose exceptions are passed on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfcluster.runtime.scripts.run_script import parse, run
from tfcluster.runtime.task.import_hook import around_import

if TYPE_CHECKING:
    from tfcluster.runtime.partition.watch import ExplainHook

USAGE = "usage: explain_program FILE RANKS SCRIPT|-m MODULE|-c CODE [ARG...]"
_LIBRARIES = ("tensorflow", "keras")


def main(argv: Sequence[str]) -> int | None:
    """Run the program and write what was found out; the result is for ``sys.exit``."""
    program = parse(argv[2:])
    if program is None:
        sys.exit(USAGE)
    file, ranks = Path(argv[0]).absolute(), int(argv[1])
    watches: list[ExplainHook] = []

    def before_import(name: str) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

    def after_import() -> None:
        watches.append(_installed(ranks))

    around_import(_LIBRARIES, before=before_import, after=after_import)
    try:
        run(program)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    _write(file, ranks, watches)
    return None


def _installed(ranks: int) -> ExplainHook:
    from tfcluster.runtime import tf_patches
    from tfcluster.runtime.partition.watch import ExplainHook

    watch = ExplainHook(ranks)
    tf_patches.TABLE.install(
        {
            tf_patches.CALL_FUNCTION: watch.call,
            tf_patches.FLAT_CALL: watch.flat_call,
            tf_patches.DATASET_ITER: watch.iterate,
        }
    )
    return watch


def _write(file: Path, ranks: int, watches: Sequence[ExplainHook]) -> None:
    document: dict[str, object] = {"ranks": ranks, "mostly_whole": None}
    document |= {"functions": [], "loops": []}
    if watches:
        from tfcluster.runtime.partition import explain

        (watch,) = watches
        document = explain.to_json(watch.functions, watch.loops, ranks)
    file.write_text(json.dumps(document), encoding="utf-8")

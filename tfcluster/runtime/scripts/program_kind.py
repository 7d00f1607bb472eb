"""Finds out what kind of program this is: who distributes its training?

- A program that distributes its training by itself, as scripts for Horovod do. It
  shards its data, exchanges its gradients and lets rank 0 write files, so the runtime
  does none of this for it.
- A TensorFlow 1 script that trains in a cluster. It builds a graph in each task and
  uses parameter servers through sessions. So the runtime shards nothing for it, and
  each task has its own random seed.
- Any other program: the runtime distributes its training.

The kind is known from the program's main file before its first line runs, or else from
its first call. The module uses neither TensorFlow nor Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tfcluster.plan.model import Strategy
from tfcluster.runtime.context import Context
from tfcluster.runtime.scripts.analysis import analyse
from tfcluster.runtime.scripts.run_script import Script, import_folder


@dataclass(slots=True)
class _Kind:
    """What is known so far; a claim is never withdrawn."""

    distributes_itself: bool = False
    is_tf1_script: bool = False


_WORDS_FOR_RANKS = (
    "horovod",
    "tfcluster",
    "TFCLUSTER_",
    "TF_CONFIG",
    "_RANK",
    "PROCID",
)
"""A program with none of these words does the same on all ranks."""

_known = _Kind()
_may_distribute_itself: Callable[[], None] = lambda: None  # noqa: E731  # a default


def read(program: Script, context: Context) -> None:
    """Find out the kind from the source of the program's main file, if readable.

    Raises what ``claim_distribution`` raises.
    """
    analysis = analyse(source_of(program) or "")
    if analysis.distributes_itself:
        claim_distribution()
    if analysis.is_tf1_cluster_script and has_tf1_cluster(context):
        claim_tf1_script()


def distributes_itself() -> bool:
    """Whether the program distributes its training by itself."""
    return _known.distributes_itself


def knows_ranks(program: Script) -> bool:
    """Whether the program may do something on one rank only, by its main file."""
    source = source_of(program) or ""
    analysis = analyse(source)
    return (
        analysis.distributes_itself
        or analysis.is_tf1_cluster_script
        or any(word in source for word in _WORDS_FOR_RANKS)
    )


def claim_distribution() -> None:
    """Record that the program distributes its training by itself.

    Raises CollectiveError if batches have already been divided: see
    ``guard_distribution``.
    """
    if not _known.distributes_itself:
        _may_distribute_itself()
        _known.distributes_itself = True


def guard_distribution(check: Callable[[], None]) -> None:
    """Call ``check`` before the first claim; it raises if that claim is too late."""
    global _may_distribute_itself
    _may_distribute_itself = check


def is_tf1_script() -> bool:
    """Whether the program is a TensorFlow 1 script that trains in a cluster."""
    return _known.is_tf1_script


def claim_tf1_script() -> None:
    """Record that the program is such a script: it has a session on the cluster."""
    _known.is_tf1_script = True


def has_tf1_cluster(context: Context) -> bool:
    """Whether this task has a cluster for such scripts: a rank, and ps tasks."""
    return (
        context.strategy in (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
        and context.rank_info is not None
        and bool(context.cluster.get("ps"))
        and bool(context.addresses)
    )


def source_of(program: Script) -> str | None:
    """The source of a program's main file; None if it is unreadable."""
    if program.option == "-c":
        return program.target
    for path in _main_files(program):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return None


def source_of_module(program: Script, name: str) -> str | None:
    """The source of a module in the program's own folder; None if it is elsewhere."""
    folder = import_folder(program)
    if folder is None:
        return None
    module = Path(folder, *name.split("."))
    for path in (module.with_name(f"{module.name}.py"), module / "__init__.py"):
        with suppress(OSError, ValueError):
            return path.read_text(encoding="utf-8")
    return None


def _main_files(program: Script) -> Iterator[Path]:
    """Where the main file may be. Nothing is imported to find a module's."""
    if program.option != "-m":
        yield from (Path(program.target), Path(program.target, "__main__.py"))
        return
    for folder in (import_folder(program), *sys.path):
        if folder is not None:
            module = Path(folder, *program.target.split("."))
            yield from (module.with_name(f"{module.name}.py"), module / "__main__.py")

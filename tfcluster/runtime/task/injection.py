"""Installs the training runtime for a program that does not know about it.

``begin`` is called before the program's first line, and ``install`` once TensorFlow or
Keras is imported. Neither function imports these libraries; their patches are in
``runtime.keras``.
"""

from __future__ import annotations

import builtins
import functools
import hmac
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from tfcluster.base import versions
from tfcluster.plan.model import Strategy
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.task.generators import (
    seed_generators,
    seed_tensorflow_generators,
)
from tfcluster.runtime.task.import_hook import around_import
from tfcluster.runtime.telemetry import exit_status
from tfcluster.runtime.telemetry.agent_channel import reporter

if TYPE_CHECKING:
    from tfcluster.runtime.keras.training_session import TrainingSession
    from tfcluster.runtime.recording_files import RecordingFiles

_SEED_BITS = 31
_PS_STRATEGIES = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Strategies whose gradients are applied by ps tasks, even with one training task."""

_warned: set[str] = set()


def begin(context: Context) -> None:
    """Prepare the program: exit status, printing by the chief only, and equal seeds.

    All ranks seed Python's and numpy's generators equally; the program may set its own
    seeds later. No seeds are set for a program that distributes its training by itself:
    it may rely on a different random order on each rank.
    """
    if _concerns(context):
        exit_status.install()
        if not context.is_chief and "print" in context.options.chief_only:
            _silence_print()
    elif context.recording is None:
        return
    if not program_kind.distributes_itself() or context.recording is not None:
        seed_generators(common_seed(context))


def _silence_print() -> None:
    """Make ``print`` do nothing, except to files.

    All ranks still write errors, warnings and log messages.
    """
    original = builtins.print

    @functools.wraps(original)
    def silent(*values: Any, file: Any = None, **kwargs: Any) -> None:
        if file not in (None, sys.stdout, sys.stderr):
            original(*values, file=file, **kwargs)

    builtins.print = silent


def install(context: Context) -> None:
    """Make TensorFlow and Keras, imported or not, train on all ranks."""
    if not _concerns(context):
        return

    def into_tensorflow() -> None:
        if not program_kind.distributes_itself():
            seed_tensorflow_generators(common_seed(context))
        if context.options.transport == "tensorflow":
            from tfcluster.runtime import process_group

            # Collective ops can only be configured before the program's first op.
            process_group.join(context)
        if not program_kind.has_tf1_cluster(context):
            # Imported here, because it imports TensorFlow.
            from tfcluster.runtime.tf1.undivided_graphs import UndividedGraphs

            UndividedGraphs(warns=context.is_chief).install()

    def into_keras() -> None:
        if program_kind.distributes_itself():
            return
        import keras

        refuse_other_backends(keras.backend.backend())
        from tfcluster.runtime.keras import internals

        warn_of_unknown_versions(context)
        internals.check()
        # Imported here, because they import numpy and TensorFlow.
        from tfcluster.runtime.keras.strategies import select

        session = select.begin(context)
        program_kind.guard_distribution(lambda: _refuse_late_claim(session))

    if "tensorflow" in sys.modules:
        into_tensorflow()
    around_import(("keras",), before=lambda name: None, after=into_keras)


def record(context: Context) -> None:
    """Record the steps of the program's training, for ``tfcluster verify``."""
    recording = context.recording
    if recording is None or context.rank_info is None:
        return

    @functools.cache
    def files() -> RecordingFiles:
        # Imported here, because it imports numpy.
        from tfcluster.runtime.recording_files import RecordingFiles

        return RecordingFiles(recording, context)

    def into_tensorflow() -> None:
        # Imported here, because they import TensorFlow.
        import tensorflow as tf

        from tfcluster.runtime.tf1.step_recorder import GraphStepRecorder

        tf.random.set_seed(recording.seed)
        GraphStepRecorder(files(), context, recording.seed).install()

    def into_keras() -> None:
        # Imported here, because they import Keras.
        from tfcluster.runtime.keras import internals
        from tfcluster.runtime.keras.step_recorder import StepRecorder

        internals.check()
        StepRecorder(files(), context).install()

    if "tensorflow" in sys.modules:
        into_tensorflow()
    around_import(("keras",), before=lambda name: None, after=into_keras)


def refuse_training() -> None:
    """Let no evaluator train that has the program, and so the files, of the ranks."""

    def into_keras() -> None:
        from tfcluster.runtime.keras import patches

        patches.TABLE.install(
            {patches.MODEL_FIT: refuse}, HandlerPlace.STRATEGY, always=True
        )

    def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        raise CollectiveError(
            "the evaluator runs the program of the ranks, and trains: it would write "
            "over the files of the chief. Give it a command of its own, such as "
            "'tasks: {evaluator: {command: python evaluate.py}}', or let the program "
            "do something else where TF_CONFIG's task is 'evaluator'"
        )

    around_import(("keras",), before=lambda name: None, after=into_keras)


def warn_of_unknown_versions(context: Context) -> None:
    """Warn once about imported libraries that are newer than the tested versions.

    Only the chief warns, for all ranks.
    """
    warnings = [text for text in versions.imported_unknown() if text not in _warned]
    if not warnings or not context.is_chief or context.strategy is Strategy.NONE:
        return
    _warned.update(warnings)
    text = "; ".join(warnings)
    reporter().warning(text)
    sys.stderr.write(f"tfcluster: warning: {text}\n")


def refuse_other_backends(library: str) -> None:
    """Raise CollectiveError for a Keras backend other than TensorFlow."""
    if library != "tensorflow":
        raise CollectiveError(
            f"KERAS_BACKEND is {library!r} in its environment, but tfcluster can "
            "distribute only Keras's 'tensorflow' backend: unset KERAS_BACKEND, or set "
            "'runtime: {strategy: none}', which leaves the program alone"
        )


def common_seed(context: Context) -> int:
    """A seed, 0 <= seed < 2**31, that is equal on all ranks and new for every run."""
    if context.recording is not None:
        return context.recording.seed
    # A worker that is restarted alone must reuse the seed of its running peers.
    attempt = 0 if context.is_independent else context.attempt
    message = f"seed {attempt}{_child()}".encode()
    digest = hmac.digest(context.token, message, "sha256")
    return int.from_bytes(digest, "big") % (1 << _SEED_BITS)


def _child() -> str:
    """The name of this process if multiprocessing started it, else empty.

    Children get different seeds, so that they do not all draw the same numbers.
    """
    process = sys.modules.get("multiprocessing.process")
    # A child that is spawned has its name, but not yet its parent, while it imports the
    # program.
    name = "MainProcess" if process is None else process.current_process().name
    return "" if name == "MainProcess" else f" {name}"


def _concerns(context: Context) -> bool:
    if context.strategy is Strategy.NONE or context.rank_info is None:
        return False
    remote = context.data_service is not None
    if context.options.shards is not None:
        return True  # Weights must get the same bits on one rank as on several ranks.
    return context.size > 1 or remote or context.strategy in _PS_STRATEGIES


def _refuse_late_claim(session: TrainingSession) -> None:
    """Raise CollectiveError if ranks have already trained on the same batches."""
    if session.applies == 0:
        return
    raise CollectiveError(
        "the program combines gradients over the ranks itself, but the ranks have "
        "already trained on the same batches: most of its data was not used. Create "
        "DistributedOptimizer or DistributedGradientTape before the first training "
        "step, or name them (or 'import horovod.tensorflow') in the program's main "
        "file. Or remove the exchange: tfcluster averages the gradients. Or set "
        "runtime.strategy: none, with which tfcluster leaves the program alone"
    )

"""Put the training runtime around a program that knows nothing of it.

``begin`` comes before the program's first line, ``install`` once TensorFlow or Keras is
imported. Neither imports them; what is done to them stands in ``runtime.keras``.
"""

from __future__ import annotations

import hmac
import random
import sys
from typing import TYPE_CHECKING

from tfcluster import versions
from tfcluster.model import Strategy
from tfcluster.runtime.context import Context
from tfcluster.runtime.scripts import chief_only_output, self_distributed
from tfcluster.runtime.task.import_hook import around_import
from tfcluster.runtime.telemetry import exit_status
from tfcluster.runtime.telemetry.agent_channel import reporter

if TYPE_CHECKING:
    from tfcluster.runtime.keras.session import Session

_SEED_BITS = 31
_SERVED = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Gradients are applied by ps tasks, also where there is only one that trains."""

_told: set[str] = set()


def begin(context: Context) -> None:
    """Have all ranks draw the same random numbers, where the program sets no seed.

    Not where it gives each rank data of its own: that may be another random order.
    """
    if not _concerns(context):
        return
    exit_status.install()
    chief_only_output.silence_print(context)
    if self_distributed.claimed():
        return
    seed = common_seed(context)
    random.seed(seed)

    def seed_numpy() -> None:
        import numpy as np

        np.random.seed(seed)

    around_import(("numpy",), before=lambda name: None, after=seed_numpy)


def install(context: Context) -> None:
    """Make TensorFlow and Keras, imported or not, train on all ranks."""
    if not _concerns(context):
        return

    def into_tensorflow() -> None:
        import tensorflow as tf

        if not self_distributed.claimed():
            tf.random.set_seed(common_seed(context))
        if context.options.transport == "tensorflow":
            from tfcluster.runtime import process_group

            # Its collective ops are set up before the program's first op, or never.
            process_group.join(context)

    def into_keras() -> None:
        if self_distributed.claimed():
            return
        import keras

        refuse_other_backends(keras.backend.backend())
        from tfcluster.runtime.keras import internals

        warn_of_unknown_versions(context)
        internals.check()
        # Only now: they import numpy and TensorFlow.
        from tfcluster.runtime.keras.checks.own_exchanges import OwnExchanges
        from tfcluster.runtime.keras.strategies import select

        session = select.begin(context)
        OwnExchanges(session, context.rank, context.size).install()
        self_distributed.guard(lambda: _refuse_late_claim(session))

    if "tensorflow" in sys.modules:
        into_tensorflow()
    around_import(("keras",), before=lambda name: None, after=into_keras)


def warn_of_unknown_versions(context: Context) -> None:
    """Tell of imported libraries that are newer than those that were tested; once.

    The chief does, for all ranks.
    """
    found = [text for text in versions.imported_unknown() if text not in _told]
    if not found or not context.is_chief or context.strategy is Strategy.NONE:
        return
    _told.update(found)
    text = "; ".join(found)
    reporter().warning(text)
    sys.stderr.write(f"tfcluster: warning: {text}\n")


def refuse_other_backends(backend: str) -> None:
    """Raise CollectiveError for a Keras backend other than TensorFlow."""
    if backend != "tensorflow":
        # Not at the top: it brings numpy, which no program pays for that has no need.
        from tfcluster.runtime.collective import CollectiveError

        raise CollectiveError(
            f"KERAS_BACKEND is {backend!r}: only models on the 'tensorflow' backend "
            "are trained on all ranks (strategy: none leaves the program alone)"
        )


def common_seed(context: Context) -> int:
    """A number that is the same on all ranks and new for every run."""
    # A task that is started again beside others that go on draws what they draw.
    attempt = 0 if _independent(context) else context.attempt
    message = f"seed {attempt}{_child()}".encode()
    digest = hmac.digest(context.token, message, "sha256")
    return int.from_bytes(digest, "big") % (1 << _SEED_BITS)


def _child() -> str:
    """Which child of the program this is, where multiprocessing has started it.

    Children have seeds of their own: they would all draw the same numbers otherwise.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return ""
    return f" {process.current_process().name}"


def _concerns(context: Context) -> bool:
    if context.strategy is Strategy.NONE or context.place is None:
        return False
    remote = context.data_service is not None
    return context.size > 1 or remote or context.strategy in _SERVED


def _independent(context: Context) -> bool:
    """Whether the tasks don't wait for each other."""
    return (
        context.strategy is Strategy.PARAMETER_SERVER
        and not context.options.synchronous
    )


def _refuse_late_claim(session: Session) -> None:
    """Batches have been divided for the program already: it cannot do so as well."""
    if session.applies == 0 and not session.inside_keras:
        return
    from tfcluster.runtime.collective import CollectiveError

    raise CollectiveError(
        "the program combines gradients over the ranks by itself, but its batches have "
        "been divided among the ranks already: most of its data would not be used. "
        "DistributedOptimizer and DistributedGradientTape belong before the first step "
        "of training, or have their names in the program's main file, and so has "
        "'import horovod.tensorflow'. Or leave the exchange out: gradients are "
        "averaged without it. Or set runtime.strategy: none, and nothing is done for "
        "the program"
    )

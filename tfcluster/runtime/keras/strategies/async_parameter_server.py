"""Asynchronous training: ranks do not wait for each other and share only the ps tasks.

Each rank computes whole batches, and its metrics cover its own batches; the chief
prints and saves. Ranks inform each other by notes on the ps tasks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tfcluster.runtime import contract
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.round_robin_sharding import (
    FitBatches,
    LoopBatches,
    ShardSpec,
)
from tfcluster.runtime.keras.strategies.async_callbacks import Epochs, FreshWeights
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving, Name
from tfcluster.runtime.keras.train.partitioned_models import PartitionedModels
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Callback, Layer, Model
from tfcluster.runtime.parameter_server.progress import Progress
from tfcluster.runtime.tensor_types import Array

T = TypeVar("T")

_LAST_LOGS = "_tfcluster_last_logs"
_SUSPICIOUS = 3
"""Warn after this many undivided batches in a row: a loop's first batch is never
divided."""

_UNDIVIDED = (
    "every rank pushes the gradients of all batches: batches are not distributed, "
    "and each counts once per rank. Batches are distributed in model.fit and in "
    "loops over a batched tf.data.Dataset"
)


class AsyncRank(PartitionedModels):
    """The hooks of a rank; on the methods of a model, and what these share."""

    def __init__(
        self,
        session: Session,
        shard: ShardSpec,
        server_models: ServerModels,
        progress: Progress,
    ) -> None:
        super().__init__(session, AsyncSaving(session, progress, self._settle_loops))
        self._shard = shard
        self._server_models = server_models
        self._progress = progress
        self._updates = ServedUpdates(session, server_models, self._pushed)
        self._batches = FitBatches(session, shard, self._set_idle)
        self._loops = LoopBatches(session, shard)
        self._undivided = 0
        self._calls = 0

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        super().install()
        self._session.settle = self._server_models.settle
        atexit.register(self._end_program)
        self._updates.install()
        self._batches.install()
        self._loops.install()
        self._files.install()
        XlaFallback(self._session).install()
        patches.TABLE.install(
            {
                patches.MODEL_TRAIN_ON_BATCH: self._train_on_batch,
                patches.LAYER_GET_WEIGHTS: self._get_weights,
            }
        )

    # --- updates ----------------------------------------------------------------------

    def _pushed(self, optimizer: str) -> None:
        session = self._session
        session.applies += 1
        session.step_rate.applied(optimizer)
        if session.inside_keras or not session.divides:
            return
        self._undivided = 0 if self._loops.divides_now else self._undivided + 1
        if self._undivided == _SUSPICIOUS:
            session.warn(_UNDIVIDED)

    def _set_idle(self, idle: bool) -> None:
        self._updates.idle = idle

    def _settle_loops(self) -> None:
        """After a loop of the program, fetch weights that include all batches."""
        if self._loops.take_ended():
            self._progress.await_loops()
            self._server_models.pull()

    def _end_program(self) -> None:
        # A ps may have been lost; then nobody waits for this rank.
        with suppress(CollectiveError):
            self._progress.program_ended()

    # --- methods of a model -----------------------------------------------------------

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        server_models, progress = self._server_models, self._progress
        return [
            FreshWeights(server_models, progress),
            *super().around(callbacks),
            Epochs(self._session, server_models, progress, self._updates),
        ]

    def fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            with self._batches.sharding_next_iterator():
                return super().fit(original, model, *args, **kwargs)
        except BaseException:
            # Otherwise the others would wait for this rank while its program continues.
            with suppress(CollectiveError):
                self._progress.abandon_fit()
            raise

    def evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        # Before a validation, FreshWeights does this.
        if not self._session.inside_keras:
            self._server_models.pull()
        return super().evaluate(original, model, *args, **kwargs)

    def _train_on_batch(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run every N-th call on this rank; other calls return its last result."""
        number, self._calls = self._calls, self._calls + 1
        last = vars(model).get(_LAST_LOGS)
        divides = self._session.divides and not self._loops.divides_now
        if last is not None and divides and not self._shard.takes(number):
            return last
        with translated(), self._session.entering():
            logs = original(model, *args, **kwargs)
        contract.mark(model, _LAST_LOGS, logs)
        return logs

    def _get_weights(
        self, original: Callable[[Layer], list[Array]], layer: Layer
    ) -> list[Array]:
        """After a loop of the program, fetch weights that include all ranks' batches.

        Otherwise there is nothing to do: this rank's last push returned the weights.
        """
        if not self._session.inside_keras:
            self._settle_loops()
        return original(layer)


class AsyncSaving(ChiefOnlySaving):
    """Lets only the chief save. Outside of ``fit``, the other ranks wait for it."""

    def __init__(
        self, session: Session, progress: Progress, settle_loops: Callable[[], None]
    ) -> None:
        super().__init__(session)
        self._progress = progress
        self._settle_loops = settle_loops

    def chief_only(
        self, act: Callable[[], T], what: str, name: Name | None = None
    ) -> T | str | None:
        """Call ``act`` on the chief; see ``ChiefOnlySaving``.

        ``name`` is ignored: the ranks do not compare it, since they do not wait for
        each other here. Within ``fit``, other ranks return None at once. Outside of
        ``fit``, they raise CollectiveError if ``act`` raised on the chief.
        """
        session = self._session
        if session.within("saving"):
            return act()
        if not session.inside_keras:
            self._settle_loops()
        session.settle(what)
        if session.inside_keras:
            if not session.chief:
                return None
            with session.saving(what):
                return act()
        if not session.chief:
            return self._progress.wait_for_writing()
        try:
            with session.saving(what):
                result = act()
        except Exception as error:
            self._progress.written("", error=f"the chief could not save: {error}")
            raise
        self._progress.written(result if isinstance(result, str) else "")
        return result

"""What asynchronous ranks add to the methods of a Keras model.

Each rank computes whole batches, and its metrics cover its own batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

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
from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.partitioned_models import PartitionedModels
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Callback, Layer, Model
from tfcluster.runtime.tensor_types import Array

_LAST_LOGS = "_tfcluster_last_logs"


class AsyncModels(PartitionedModels):
    """The hooks on the methods of a model."""

    def __init__(
        self,
        session: Session,
        files: ChiefOnlySaving,
        shard: ShardSpec,
        server_models: ServerModels,
        progress: Progress,
        updates: ServedUpdates,
        batches: FitBatches,
        loops: LoopBatches,
        settle_loops: Callable[[], None],
    ) -> None:
        super().__init__(session, files)
        self._shard = shard
        self._server_models = server_models
        self._progress = progress
        self._updates = updates
        self._batches = batches
        self._loops = loops
        self._settle_loops = settle_loops
        self._calls = 0

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        super().install()
        patches.TABLE.install(
            {
                patches.MODEL_TRAIN_ON_BATCH: self._train_on_batch,
                patches.LAYER_GET_WEIGHTS: self._get_weights,
            }
        )

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

"""The behaviour that asynchronous ranks add to the methods of a Keras model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from tfcluster.runtime import contract
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.data.round_robin_sharding import FitBatches, ShardSpec
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies.async_callbacks import Epochs, FreshWeights
from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.injected_callbacks import (
    for_evaluation,
    with_chief_only_files,
)
from tfcluster.runtime.keras.train.model_methods import MethodCall
from tfcluster.runtime.keras.types import Callback, CallbackList, Layer, Model
from tfcluster.runtime.tensor_types import Nest


class AsyncTraining:
    """The implementation of ``TrainingPolicy`` for ranks that do not wait.

    Each rank computes whole batches, and its metrics cover its own batches.
    """

    def __init__(
        self,
        session: Session,
        shard: ShardSpec,
        server_models: ServerModels,
        progress: Progress,
        batches: FitBatches,
        settle_loops: Callable[[], None],
        files: ChiefOnlySaving,
    ) -> None:
        self._session = session
        self._shard = shard
        self._server_models = server_models
        self._progress = progress
        self._batches = batches
        self._settle_loops = settle_loops
        self._files = files
        self._calls = 0

    def check_layers(self, model: Model) -> None:
        """Do nothing: a rank has whole batches, so it can train every layer."""

    def prepare(self, model: Model) -> None:
        """Do nothing: steps need no change, because their batches are whole."""

    def callbacks_of_fit(self, callbacks: Sequence[Callback]) -> list[Callback]:
        return [
            FreshWeights(self._server_models, self._progress),
            *with_chief_only_files(callbacks, self._session, self._files),
            Epochs(self._session, self._server_models, self._progress),
        ]

    def callbacks_of_evaluation(self, callbacks: Nest) -> CallbackList | list[Callback]:
        return for_evaluation(callbacks, self._session)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        try:
            with self._batches.sharding_next_iterator():
                yield
        except BaseException:
            # Otherwise the others would wait for this rank while its program continues.
            with suppress(CollectiveError):
                self._progress.abandon_fit()
            raise

    @contextmanager
    def evaluating(self, model: Model, *, outermost: bool) -> Iterator[None]:
        # Before a validation, FreshWeights does this.
        if outermost:
            self._server_models.pull()
        yield

    def train_on_batch(self, call: MethodCall) -> object:
        """Run every N-th call on this rank; other calls return its last result."""
        number, self._calls = self._calls, self._calls + 1
        last = vars(call.model).get("_tfcluster_last_logs")
        divides = self._session.divides and not self._session.loop.divided
        if last is not None and divides and not self._shard.takes(number):
            return last
        logs = call.run()
        contract.mark(call.model, "_tfcluster_last_logs", logs)
        return logs

    def test_on_batch(self, call: MethodCall) -> object:
        return call.run()

    def before_get_weights(self, layer: Layer) -> None:
        """After a loop of the program, fetch weights that include all ranks' batches.

        Otherwise there is nothing to do: this rank's last push returned the weights.
        """
        if not self._session.inside_keras:
            self._settle_loops()

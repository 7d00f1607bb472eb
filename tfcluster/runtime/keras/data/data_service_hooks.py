"""Lets the run's data tasks compute the program's datasets.

This applies to the datasets of ``fit`` and ``evaluate`` and to the datasets over which
custom loops iterate. It does not change which rows of a batch belong to which rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfcluster.model import Strategy
from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import Place
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.data.data_service_client import DataServiceClient
from tfcluster.runtime.keras.data.dataset_graph import Pipeline
from tfcluster.runtime.keras.data.round_robin_sharding import (
    IS_SHARDED,
    YIELDS_BATCHES,
    serves_a_loop,
)
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import EpochIterator
from tfcluster.runtime.tensor_types import Dataset, Nest


@dataclass
class _Known:
    """A dataset that the data tasks compute, and the number of passes begun so far."""

    number: int
    pipeline: Pipeline | None
    passes: int = 0


def data_service_client(context: Context) -> DataServiceClient | None:
    """The client of the run's tf.data service.

    None if the run has no data service, or if this task can no longer join it.
    """
    if context.data_service is None:
        return None
    options = context.options
    independent = context.strategy is Strategy.PARAMETER_SERVER
    in_step = not independent or options.synchronous
    client = DataServiceClient(
        service=context.data_service,
        tasks=context.data_tasks,
        run=f"{context.run or 'run'}/{context.attempt}",
        rank=context.rank,
        size=context.size,
        in_step=in_step,
    )
    if not options.divides:
        # Each rank has its own pipeline.
        run = f"{client.run}/{context.rank}"
        return replace(client, run=run, rank=0, size=1, in_step=True)
    # A task that restarts while others run does not know how far they are.
    return None if context.attempt and not in_step else client


class DataServiceHooks:
    """The hooks on everything that iterates over datasets."""

    def __init__(self, session: Session, client: DataServiceClient) -> None:
        self._session = session
        self._client = client
        self._known: weakref.WeakKeyDictionary[Dataset, _Known] = (
            weakref.WeakKeyDictionary()
        )
        self._count = 0

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        epochs = {patches.EPOCH_ITERATOR: self._epochs}
        patches.TABLE.install(epochs, Place.SERVICE)
        tf_patches.TABLE.install({tf_patches.DATASET_ITER: self._iter}, Place.SERVICE)

    def _epochs(
        self,
        original: Callable[..., None],
        iterator: EpochIterator,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(iterator, *args, **kwargs)
        if not internals.reads_dataset(iterator):
            return
        if self._session.within("predicting"):
            # One rank may predict without the others.
            return
        # The program's dataset; Keras derives others from it (class weights).
        dataset = internals.dataset_of(iterator)
        known = self._look(dataset)
        if known.pipeline is None:
            return
        internals.set_dataset(iterator, Passes(dataset, lambda: self._pass(known)))
        contract.mark(iterator, IS_SHARDED, not self._client.in_step)
        if self._client.tasks > 1 or not self._client.in_step:
            _leave_uncounted(iterator)

    def _iter(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        if not self._client.in_step or not serves_a_loop(self._session, dataset):
            return original(dataset)
        known = self._look(dataset)
        return original(dataset if known.pipeline is None else self._pass(known))

    def _look(self, dataset: Dataset) -> _Known:
        known = self._known.get(dataset)
        if known is None:
            self._count += 1
            known = _Known(self._count, self._pipeline(dataset))
            self._known[dataset] = known
        return known

    def _pipeline(self, dataset: Dataset) -> Pipeline | None:
        try:
            pipeline = Pipeline(dataset)
            reason = pipeline.why_local(self._client.tasks)
        except (tf.errors.OpError, ValueError) as error:
            reason = str(error).splitlines()[0]
        if reason is None:
            return pipeline
        self._session.warn(
            f"a tf.data pipeline is computed by every rank, not by the data tasks: "
            f"{reason}"
        )
        return None

    def _pass(self, known: _Known) -> Dataset:
        """The dataset of the next pass."""
        assert known.pipeline is not None
        job = f"{self._client.run}/{known.number}/{known.passes}"
        source = known.pipeline.for_pass(known.passes, job)
        known.passes += 1
        made = self._client.distributed(source, job, known.pipeline.cardinality)
        contract.mark(made, YIELDS_BATCHES, True)
        return made


class Passes(tf.data.Dataset):  # type: ignore[misc]  # untyped
    """A dataset that reads from a new dataset, created by ``begin``, in each pass."""

    def __init__(self, dataset: Dataset, begin: Callable[[], Dataset]) -> None:
        self._dataset = dataset
        self._begin = begin
        super().__init__(tf_internals.variant_of(dataset))

    def __iter__(self) -> Iterator[Nest]:
        return iter(self._begin())

    def _inputs(self) -> Sequence[Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Nest:
        return self._dataset.element_spec


def _leave_uncounted(iterator: EpochIterator) -> None:
    """Let each epoch end where its data ends, however many batches the last one had."""
    # Without a number of steps, every pass ends because the data runs out, which is no
    # reason to warn.
    warns = internals.steps_of(iterator) is not None
    uncounted = internals.counted(type(iterator), None, warns=warns)
    patches.TABLE.replace(patches.ONE_EPOCH_ITERATOR_CLASS, iterator, uncounted)

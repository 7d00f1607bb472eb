"""Lets the run's data tasks compute the program's datasets.

This applies to the datasets of ``fit`` and ``evaluate`` and to the datasets over which
custom loops iterate. It does not change which rows of a batch belong to which rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.data_service.client import DataServiceClient
from tfcluster.runtime.data_service.pipeline import Pipeline
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.data.round_robin_sharding import (
    IS_SHARDED,
    YIELDS_BATCHES,
    serves_a_loop,
)
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import EpochIterator
from tfcluster.runtime.tensor_types import Dataset, Nest


@dataclass
class _Served:
    """A dataset that the data tasks compute, and the number of passes begun so far."""

    number: int
    pipeline: Pipeline | None
    passes: int = 0


class DataServiceHooks:
    """The hooks on everything that iterates over datasets."""

    def __init__(self, session: TrainingSession, client: DataServiceClient) -> None:
        self._session = session
        self._client = client
        self._datasets: weakref.WeakKeyDictionary[Dataset, _Served] = (
            weakref.WeakKeyDictionary()
        )
        self._count = 0

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        epochs = {patches.EPOCH_ITERATOR: self._epochs}
        patches.TABLE.install(epochs, HandlerPlace.SERVICE)
        tf_patches.TABLE.install(
            {tf_patches.DATASET_ITER: self._iter}, HandlerPlace.SERVICE
        )

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
        served = self._served(dataset)
        if served.pipeline is None:
            return
        passes = Passes(dataset, lambda: iter(self._pass(served)))
        internals.set_dataset(iterator, passes)
        contract.mark(iterator, IS_SHARDED, not self._client.in_step)
        if self._client.tasks > 1 or not self._client.in_step:
            _leave_uncounted(iterator)

    def _iter(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        if not self._client.in_step or not serves_a_loop(self._session, dataset):
            return original(dataset)
        served = self._served(dataset)
        return original(dataset if served.pipeline is None else self._pass(served))

    def _served(self, dataset: Dataset) -> _Served:
        served = self._datasets.get(dataset)
        if served is None:
            self._count += 1
            served = _Served(self._count, self._pipeline(dataset))
            self._datasets[dataset] = served
        return served

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

    def _pass(self, served: _Served) -> Dataset:
        """The dataset of the next pass."""
        assert served.pipeline is not None
        job = f"{self._client.run}/{served.number}/{served.passes}"
        source = served.pipeline.for_pass(served.passes, job)
        served.passes += 1
        dataset = self._client.distributed(source, job, served.pipeline.cardinality)
        contract.mark(dataset, YIELDS_BATCHES, True)
        return dataset


class Passes(tf.data.Dataset):  # type: ignore[misc]  # untyped
    """A dataset like another one, whose iterators ``begin`` creates."""

    def __init__(self, dataset: Dataset, begin: Callable[[], Iterator[Nest]]) -> None:
        self._dataset = dataset
        self._begin = begin
        super().__init__(tf_internals.variant_of(dataset))

    def __iter__(self) -> Iterator[Nest]:
        return self._begin()

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

"""Without ``tf.data`` autotuning iterators end at once, and read equally far ahead.

In each iterator a thread looks for better settings, first after 10 ms and then after
twice as long each time, up to a minute. Deleting an iterator wakes this thread and
waits for its end. But "cancelled" is only set after the wake-up
(``CancellationManager::StartCancel``): if the thread checks it before that, the thread
continues to sleep. So the end of an epoch may take as long as the epoch did. On idle
cores this usually happens, and all ranks wait for the slowest.

A buffer of ``prefetch(AUTOTUNE)`` begins with one element, and grows when it happens to
be full and then empty. How far an iterator has read ahead decides what the next one
yields: passes over a shuffled dataset draw their seeds from one generator, when they
begin. So the buffer keeps its first size, or ranks would train on different batches.
One machine may read further ahead, so what depends on that gets a warning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.tensor_types import Dataset, Nest

_AHEAD = 1
"""The number of elements with which TensorFlow lets a buffer begin."""


def install(warn: Callable[[str], None]) -> None:
    """Disable autotuning in every iterator unless the script asks for it.

    ``AUTOTUNE`` then means as many parallel calls as TensorFlow has threads, and a
    buffer of one element. ``warn`` is called with a text where one machine may see
    another order than the ranks.
    """
    iterators = _Iterators(warn)
    tf_patches.TABLE.install(
        {
            tf_patches.DATASET_ITER: iterators.begin,
            tf_patches.DATASET_PREFETCH: _prefetch,
        },
        HandlerPlace.LAST,
    )


def _prefetch(
    original: Callable[..., Dataset],
    dataset: Dataset,
    buffer_size: Any,
    name: str | None = None,
) -> Dataset:
    if isinstance(buffer_size, int) and buffer_size == tf.data.AUTOTUNE:
        buffer_size = _AHEAD
    return original(dataset, buffer_size, name=name)


class _Iterators:
    """Begins passes over datasets."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._latest: weakref.WeakKeyDictionary[Dataset, weakref.ref[Any]]
        self._latest = weakref.WeakKeyDictionary()
        """The latest pass over a shuffled dataset that is repeated."""

    def begin(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        """A new iterator; ``original`` makes it."""
        read = as_read(dataset) if tf.executing_eagerly() else dataset
        if read is dataset:
            return original(dataset)
        shuffled, is_endless = _repeated_shuffle(dataset)
        iterator = original(read)
        if shuffled is not None:
            self._note(shuffled, iterator, is_endless=is_endless)
        return iterator

    def _note(
        self, shuffled: Dataset, iterator: Iterator[Nest], *, is_endless: bool
    ) -> None:
        latest = self._latest.get(shuffled)
        if latest is not None and (is_endless or latest() is not None):
            self._warn(
                "another pass over a shuffled, repeated dataset begins before the last "
                "one has ended. Its order depends on how far TensorFlow has read "
                "ahead: all ranks have the same order, but one machine may have "
                "another one. Make two datasets, or shuffle with "
                "reshuffle_each_iteration=False"
            )
        self._latest[shuffled] = weakref.ref(iterator)


def as_read(dataset: Dataset) -> Dataset:
    """The dataset over which an iterator begins a pass: without autotuning.

    It is the dataset itself if the script has said whether to tune it.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    return _without_autotuning(dataset)


def _without_autotuning(dataset: Dataset) -> Dataset:
    """A dataset that yields the same, the same one for all passes.

    TensorFlow optimises a dataset once. The result has the state from which some
    datasets go on in the next pass, such as ``shuffle_and_repeat``.
    """
    owner: Any = dataset
    found: Dataset | None = getattr(owner, "_tfcluster_without_autotuning", None)
    if found is None:
        found = dataset
        optimization = dataset.options().experimental_optimization
        if (
            optimization.inject_prefetch is not False
            and tf_internals.kind_of(dataset) != "Prefetch"
        ):
            # As with autotuning. It also completes a cache, since Keras does not ask
            # for more batches than there are.
            found = found.prefetch(_AHEAD)
        options = tf.data.Options()
        options.autotune.enabled = False
        found = found.with_options(options)
        # An attribute, so that both datasets end together.
        owner._tfcluster_without_autotuning = found
    return found


def _repeated_shuffle(dataset: Dataset) -> tuple[Dataset | None, bool]:
    """The ``shuffle`` in a pipeline that repeats it, and whether without an end.

    None if no function uses its results: only such functions let one machine read
    further ahead.
    """
    is_used = False
    counts: list[int] = []
    while len(inputs := tf_internals.inputs_of(dataset)) == 1:
        kind = tf_internals.kind_of(dataset)
        if kind == "Shuffle" and tf_datasets.reshuffles(dataset):
            return (dataset if is_used and counts else None), -1 in counts
        is_used |= kind.removeprefix("Parallel") in ("Map", "Prefetch")
        if kind == "Repeat":
            counts.append(tf_datasets.count_of(dataset))
        (dataset,) = inputs
    return None, False

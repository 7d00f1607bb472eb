"""Runs trials in the first steps of custom models: see ``loss_scaling_probe``.

Keras wraps the step in a function, which TensorFlow traces for the shapes of its first
batch. A trial has other shapes. So trials use a second function, which is called until
a gradient has been compared, and never after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.batches.batch_sharding import trial_bounds
from tfcluster.runtime.keras.batches.batch_slicing import (
    Part,
    common_rows,
    has_rows,
    slice_rows,
    twice,
)
from tfcluster.runtime.keras.checks.types import TrainFunction
from tfcluster.runtime.keras.session import (
    MOST_TRIALS,
    TRIAL_RANK,
    Session,
    Share,
    Trials,
)
from tfcluster.runtime.keras.types import Model
from tfcluster.runtime.tensor_types import Flag, Leaf, Nest, Tensor, Weight

_OWN = ("train_step", "compute_loss")


@dataclass(slots=True)
class _Trial:
    """The state of the trial of one train function."""

    allowed: bool | None = None
    """None if the ranks have not been asked yet."""
    steps: int = 0

    def is_over(self) -> bool:
        return self.allowed is False or self.steps >= MOST_TRIALS

    def end(self) -> None:
        self.allowed = False


class TrialSteps:
    """The hook on ``make_train_function``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trial: _Trial | None = None

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.MODEL_MAKE_TRAIN_FUNCTION: self._make})

    @property
    def is_trying(self) -> bool:
        """Whether the step that is being traced or run belongs to a trial."""
        return self._trial is not None

    def part(self, data: Nest, part: Part) -> Part:
        """``part``, this rank's part of ``data``, or a different part during a trial.

        It has the structure, dtypes and dimensions of ``data``, except the first one.
        """
        if self._trial is None:
            return part
        tried = _trial_part(data, self._session.rank, self._session.size)
        if tried is None:
            self._trial.end()
            return part
        possible, trial_part = tried
        if isinstance(possible, bool):
            return trial_part if possible else part
        return _either(possible, trial_part, part)

    def _make(
        self,
        original: Callable[..., TrainFunction],
        model: Model,
        force: bool = False,
    ) -> TrainFunction:
        before = model.train_function
        found = original(model, force=force)
        trials = self._session.trials
        after = model.train_function
        if trials is None or after is before or not has_own_step(model):
            return found
        original(model, force=True)
        function = self._function(trials, model.train_function, after)
        patches.TABLE.replace(patches.ONE_MODEL_TRAIN_FUNCTION, model, function)
        return found

    def _function(
        self,
        trials: Trials,
        tried: TrainFunction,
        plain: TrainFunction,
    ) -> TrainFunction:
        """A train function: ``tried`` during the trial, ``plain`` afterwards."""
        trial = _Trial()
        session, step = self._session, object()

        def train_function(iterator: Iterator[Nest]) -> Nest:
            nonlocal tried
            if trial.allowed is None:
                trial.allowed = trials.allowed()
            judged = trials.judged
            session.retraced_step = step
            try:
                if trial.is_over():
                    tried = plain  # Releases its graph, which is no longer needed.
                    return plain(iterator)
                trial.steps += 1
                self._trial = trial
                return tried(iterator)
            finally:
                session.retraced_step = self._trial = None
                if trials.judged > judged:
                    trial.end()

        return train_function


def has_own_step(model: Model) -> bool:
    """Whether the model or its class overrides the step or the loss."""
    return not all(internals.is_of_keras(getattr(model, name)) for name in _OWN)


def _trial_part(data: Nest, rank: int, size: int) -> tuple[bool | Tensor, Part] | None:
    """Whether a batch can be a trial (a bool or tensor), and a rank's part of it.

    Returns None if a trial is impossible.
    """
    leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
    if not leaves:
        return None
    batch, common = common_rows(leaves)
    possible: bool | Tensor
    if isinstance(batch, int) and isinstance(common, bool):
        possible = common and batch >= size
    else:
        batch = tf.cast(batch, tf.int64)
        possible = common & (batch >= size)
    start, stop = trial_bounds(batch, rank, size)
    doubles = rank == TRIAL_RANK
    rows = stop - start

    def rows_of(leaf: Leaf) -> Leaf:
        if not has_rows(leaf):
            return leaf
        piece = slice_rows(leaf, start, stop)
        return twice(piece) if doubles else piece

    share = Share(
        rows=0 if doubles else rows,
        counts=not doubles,
        total=batch,
        trial=True,
        uncounted=2 * rows if doubles else 0,
        first=start,
    )
    return possible, Part(tf.nest.map_structure(rows_of, data), share)


def _either(possible: Tensor, one: Part, other: Part) -> Part:
    """``one`` if the tensor ``possible`` is true, else ``other``."""

    def chosen(one: Leaf, other: Leaf) -> Leaf:
        if not has_rows(other):
            return other
        return tf.cond(possible, lambda: one, lambda: other)

    assert one.share.total is not None
    assert other.share.total is not None
    share = Share(
        rows=_where(possible, one.share.rows, other.share.rows, tf.float64),
        counts=_where(possible, one.share.counts, other.share.counts, tf.bool),
        total=_where(possible, one.share.total, other.share.total, tf.float64),
        trial=possible,
        uncounted=_where(
            possible, one.share.uncounted, other.share.uncounted, tf.float64
        ),
        first=_where(possible, one.share.first, other.share.first, tf.int64),
        undivided=other.share.undivided,
    )
    return Part(tf.nest.map_structure(chosen, one.data, other.data), share)


def _where(
    possible: Tensor,
    then: Weight | Flag,
    other: Weight | Flag,
    dtype: tf.DType,
) -> Tensor:
    return tf.where(possible, tf.cast(then, dtype), tf.cast(other, dtype))

"""Finds random numbers that an eager program draws for the rows of one rank.

A loop may draw noise for the batch that it got: ``np.random.normal(size=(len(batch),
9))``. TensorFlow's generators draw what one machine draws for the rank's rows, but the
program's own generators know nothing of ranks: each rank draws the same numbers, for
other rows. So the ranks compare the arrays that a step gets and that have one row for
each row of the rank.

- In a trial, rank 1 has the chief's rows, each of them twice. An array that depends on
  the rows has equal halves there. Numbers that the program draws are those of the chief
  in the first half, and others in the second one. Afterwards, the ranks' generators
  have different states.
- Where no trial is made, arrays that are equal on all ranks, although the parts of the
  batch differ, were drawn. The ranks compare them in steps 2, 4, 8 and so on that train
  on parts of a batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.batches.batch_sharding import bounds, trial_bounds
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import TRIAL_RANK, Session, Share
from tfcluster.runtime.tensor_types import Nest

_LEAST_VALUES = 8
"""Arrays with fewer different numbers may be equal by chance: labels, for example."""
_MOST_ARRAYS = 100
_LAYER = "a layer that a loop calls"


class ProgramArrays:
    """The hooks on functions, layers and eager optimizers."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._batch: Nest = None
        self._found: dict[str, tuple[str, bool]] = {}
        """The arrays of this step, by their numbers and lines: a digest, and whether
        the halves of the array differ in a trial."""
        self._applies = 0
        """The number of exchanges of gradients, as of the last step."""
        self._steps = 0
        """How many steps have trained on parts of a batch, without trials."""

    def install(self) -> None:
        """Install the hooks in TensorFlow and Keras, once per process."""
        tf_patches.TABLE.install({tf_patches.FUNCTION_CALL: self._function})
        patches.TABLE.install(
            {
                patches.LAYER_CALL: self._layer,
                patches.OPTIMIZER_APPLY: self._step,
            }
        )

    def begin_batch(self, batch: Nest) -> None:
        """Note this rank's rows of the next batch of a loop."""
        self._batch = batch if self._is_due else None

    @property
    def _share(self) -> Share | None:
        """This rank's part of the batch of an eager step; None if there is no part."""
        session = self._session
        if not tf.executing_eagerly() or session.current_shard is not None:
            return None
        share = session.loop.share if session.loop.in_pass else session.share
        return None if share is None or share.undivided else share

    @property
    def _is_due(self) -> bool:
        """Whether to compare the arrays of this step; the same on all ranks."""
        share = self._share
        if share is None:
            return False
        following = self._steps + 1
        rare = following > 1 and not following & (following - 1)
        return bool(share.trial) or rare

    def _function(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._look(args[1:], kwargs)
        return self._step(original, *args, **kwargs)

    def _layer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._session.within(_LAYER) or not self._is_due:
            return original(*args, **kwargs)
        self._look(args[1:], kwargs)
        with self._session.once(_LAYER):
            return original(*args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function or an eager optimizer, and compare after some of the steps.

        All ranks reach this point after an exchange of gradients.
        """
        share, due = self._share, self._is_due
        result = original(*args, **kwargs)
        if tf.executing_eagerly() and self._session.applies > self._applies:
            self._applies = self._session.applies
            if share is not None:
                self._steps += not share.trial
                if due:
                    self._compare(share)
        return result

    def _look(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Remember arrays that have a row for each row of this rank."""
        share = self._share
        if share is None or not self._is_due:
            return
        rows, compared = int(share.present), self._compared_rows(share)
        for leaf in tf.nest.flatten((tuple(args), kwargs)):
            if len(self._found) >= _MOST_ARRAYS:
                return
            array = _array(leaf)
            if array is None or not array.ndim or len(array) != rows:
                continue
            first, second = array[:compared], array[compared:]
            if may_be_random(first):
                label = f"{len(self._found)} {user_line()}"
                differ = first.shape == second.shape and not np.allclose(first, second)
                self._found[label] = _digest(first), differ

    def _compared_rows(self, share: Share) -> int:
        """How many rows of an array are compared: those that each of the ranks has."""
        total, size = int(share.total or 0), self._session.size
        if share.trial:
            start, stop = trial_bounds(total, 0, size)
            return stop - start
        parts = [bounds(total, rank, size) for rank in range(size)]
        return min(stop - start for start, stop in parts)

    def _compare(self, share: Share) -> None:
        """Compare the ranks' arrays. All ranks call this at the same point."""
        compared, trial = self._compared_rows(share), bool(share.trial)
        data = self._batch if self._session.share is None else share.data
        arrays = map(_array, tf.nest.flatten(data, expand_composites=True))
        batch = [_digest(each[:compared]) for each in arrays if each is not None]
        ours = json.dumps([batch, self._found]).encode()
        self._found = {}
        signature = Signature("arrays of a loop")
        ranks: list[tuple[list[str], dict[str, tuple[str, bool]]]] = [
            json.loads(data)
            for data in allgather_bytes(self._session.group, ours, signature)
        ]
        if trial:
            ranks = [ranks[0], ranks[TRIAL_RANK]]
        batches, found = zip(*ranks, strict=True)
        if not trial and all(other == batches[0] for other in batches):
            return  # All that depends on such a batch is equal, too.
        for label, (digest, _) in found[0].items():
            others = [each.get(label, ("", False)) for each in found[1:]]
            alike = all(other == digest for other, _ in others)
            if alike and (not trial or others[0][1]):
                self._tell(label.partition(" ")[2])

    def _tell(self, line: str) -> None:
        self._session.differs(
            f"{line}: this call gets an array with one row for each row of the batch, "
            "and its numbers do not depend on these rows: the program draws them with "
            "numpy or another generator of its own. Each rank draws the same numbers "
            "for its own rows, so the result differs from that of one machine. Draw "
            "them with tf.random or keras.random, or in the dataset, with its rows "
            "(Dataset.zip)"
        )


def may_be_random(array: Array) -> bool:
    """Whether numbers can be equal on several ranks only if they were drawn alike.

    Labels may be equal by chance, and counts of rows (``np.arange``) always are.
    """
    if array.dtype.kind not in "fiu":
        return False
    if len(np.unique(array)) < _LEAST_VALUES:
        return False
    steps = np.diff(array.reshape(-1))
    return bool((steps != steps[0]).any())


def _array(leaf: object) -> Array | None:
    """An eager tensor, or an array, as an array; None for anything else."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if not tf_internals.is_eager(leaf):
        return None
    try:
        return np.asarray(leaf)
    except (tf.errors.OpError, NotImplementedError, TypeError):
        return None  # A resource, or a variant.


def _digest(array: Array) -> str:
    data = np.ascontiguousarray(array).tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()

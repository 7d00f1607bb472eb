"""Optimizers' variables ("slots"), which are divided between the steps of a training.

Whatever else uses such a variable finds it whole: all ranks then gather it at this
point, as they all execute the same script.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.divided_variables import (
    DividedVariable,
    DividedVariables,
    rows_of,
)
from tfcluster.runtime.partition.placement import Shard
from tfcluster.runtime.tensor_types import Tensor


class OptimizerSlots:
    """Divides variables, and makes them whole again."""

    def __init__(self, variables: DividedVariables) -> None:
        self._variables = variables
        self._in_use = False

    def _shard(self, handle: Tensor) -> Shard | None:
        divided = self._variables.of(handle)
        return divided.shard if divided is not None and divided.is_slot else None

    def divide(self, handle: Tensor, shard: Shard, name: str) -> DividedVariable:
        """Keep only this process's rows of a whole variable.

        Exchanges nothing. ``name`` is equal on all ranks.
        """
        spec = tf_functions.variable_spec(handle)
        assert spec is not None
        dtype, shape = spec
        with tf.device(handle.device):
            whole = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            pieces = []
            for split in self._variables.ranks.splits:
                first = split.first(shard.rows)
                end = first + split.count(shard.rows)
                own = rows_of(whole, first, end, shard.dim)
                with tf.variable_creator_scope(tf_internals.plain_variable):
                    pieces.append(tf.Variable(own, trainable=False))
            empty = tf.zeros([0, *shape[1:]], dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=empty)
        sizes = [int(size or 0) for size in shape]
        return self._variables.add(name, handle, sizes, shard, pieces, is_slot=True)

    def make_whole(self, handles: Sequence[Tensor] | None = None) -> None:
        """Gather these variables, or all; those that are whole stay so.

        All ranks must call this, with the same variables in the same order. Raises
        CollectiveError if this is not the main thread, or if a program is using the
        pieces; and what ``Group.exchange`` raises.
        """
        for handle in self._variables.slots() if handles is None else handles:
            divided = self._variables.of(handle)
            if divided is None or not divided.is_slot:
                continue
            self._require_main_thread(divided.name)
            value = self._variables.value(divided)
            with tf.device(handle.device):
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
            self._variables.remove(handle)

    @contextmanager
    def held_as(
        self,
        tensors: Sequence[Tensor],
        shards: Mapping[int, Shard],
        names: Callable[[], Mapping[int, str]],
    ) -> Iterator[Mapping[int, Sequence[Tensor]]]:
        """A context in which a program runs: variables are divided as it wants them.

        Those in the places that ``shards`` has are divided; all others become whole.
        Returns the handles of the pieces, by place. ``names`` returns the variables'
        names, by place. All ranks must call this. Raises what ``make_whole`` raises.
        """
        held = [(tensor, self._shard(tensor)) for tensor in tensors]
        self.make_whole(
            [
                tensor
                for place, (tensor, shard) in enumerate(held)
                if shard is not None and shard != shards.get(place)
            ]
        )
        handles = {}
        for place, shard in shards.items():
            divided = self._variables.of(tensors[place]) or self.divide(
                tensors[place], shard, names()[place]
            )
            handles[place] = divided.handles
        before, self._in_use = self._in_use, True
        try:
            yield handles
        finally:
            self._in_use = before

    def handle(self, original: Callable[[Any], Tensor], variable: Any) -> Tensor:
        """The handle of a variable that the script is about to use: it is whole then.

        ``original`` returns it. While a function is traced nothing is gathered. Raises
        what ``make_whole`` raises.
        """
        handle = original(variable)
        if self._variables.is_divided(handle) and tf.executing_eagerly():
            self.make_whole([handle])
        return handle

    def _require_main_thread(self, name: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._in_use:
            return
        raise CollectiveError(
            f"{name} is used in another thread, or by a host function in a training "
            "step, while each rank holds a piece of it (runtime.shard_optimizer). Use "
            "it in the main thread, between two steps, or remove shard_optimizer"
        )

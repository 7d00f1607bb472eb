"""Variables of which each rank holds a piece, between the programs that use it.

While a variable is divided, its own buffer is empty, and a variable of ours holds the
piece. A program that divides it gets our variable in its place. Whatever else uses the
variable finds it whole: all ranks then gather it at this point, as they all execute the
same script.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective import CollectiveError, Group, Signature, tensor_words
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.host_rows import gathered
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    Placement,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.tensor_types import Tensor, Variable


@dataclass(frozen=True, slots=True)
class _Piece:
    """This rank's piece of a variable."""

    name: str
    """The variable's name, equal on all ranks."""
    shard: Shard
    shape: Shape
    """The shape of the whole variable."""
    variable: Variable
    """A variable of ours, which holds the piece."""
    owner: weakref.ref[Tensor]
    """The variable's handle."""


class DividedVariables:
    """The variables that are divided now; every rank has the same ones.

    Variables are known by their handles: scalars of dtype ``tf.resource``.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pieces: dict[int, _Piece] = {}
        """By the ``id`` of the variables' handles."""
        self._in_use = False

    def placement(self, handle: Tensor) -> Placement:
        """What this rank holds of a variable."""
        piece = self._pieces.get(id(handle))
        return REPLICATE if piece is None else piece.shard

    def is_divided(self, handle: Tensor) -> bool:
        """Whether this rank holds only a piece of a variable."""
        return id(handle) in self._pieces

    def piece(self, handle: Tensor) -> Variable:
        """The variable that holds this rank's piece. Raises KeyError if it is whole."""
        return self._pieces[id(handle)].variable

    def divide(self, handle: Tensor, shard: Shard, name: str) -> None:
        """Keep only this rank's piece of a whole variable.

        Exchanges nothing. ``name`` is equal on all ranks.
        """
        spec = tf_functions.variable_spec(handle)
        assert spec is not None
        dtype, shape = spec
        split = Split(self._group.rank, self._group.size)
        begin, size = [0] * len(shape), [-1] * len(shape)
        begin[shard.dim] = split.first(shard.rows)
        size[shard.dim] = split.count(shard.rows)
        with tf.device(handle.device):
            whole = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            # Not an alias of the whole buffer, which it would keep alive.
            own = tf.slice(whole, begin, size)
            variable = tf_internals.plain_variable(
                _no_creator, initial_value=own, trainable=False
            )
            empty = tf.zeros([0, *shape[1:]], dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=empty)
        key, pieces = id(handle), self._pieces
        owner = weakref.ref(handle, lambda _: pieces.pop(key, None))
        pieces[key] = _Piece(name, shard, shape, variable, owner)

    def make_whole(self, handles: Sequence[Tensor] | None = None) -> None:
        """Gather these variables, or all; those that are whole stay so.

        All ranks must call this, with the same variables in the same order. Raises
        CollectiveError if this is not the main thread, or if a program is using the
        pieces; and what ``Group.exchange`` raises.
        """
        if handles is None:
            owners = [piece.owner() for piece in self._pieces.values()]
            handles = [handle for handle in owners if handle is not None]
        divided = [handle for handle in handles if self.is_divided(handle)]
        if not divided:
            return
        pieces = [self._pieces[id(handle)] for handle in divided]
        self._require_main_thread(pieces[0].name)
        words = tuple(
            tensor_words(piece.name, piece.variable.dtype.name, piece.shape)
            for piece in pieces
        )
        with self._group.exchange(Signature("gather of variables", words)) as call:
            for handle, piece in zip(divided, pieces, strict=True):
                own = np.asarray(piece.variable)
                whole = gathered(call.transport, own, piece.shard)
                with tf.device(handle.device):
                    value = tf.constant(whole)
                    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
                del self._pieces[id(handle)]

    @contextmanager
    def held_as(
        self,
        tensors: Sequence[Tensor],
        shards: Mapping[int, Shard],
        names: Mapping[int, str],
    ) -> Iterator[list[Tensor]]:
        """A context in which a program runs: variables are divided as it wants them.

        Returns its inputs: those in the places that ``shards`` has are variables to be
        divided, of these names, and replaced by the pieces; all others become whole.
        All ranks must call this. Raises what ``make_whole`` raises.
        """
        self.make_whole(
            [
                tensor
                for place, tensor in enumerate(tensors)
                if self.placement(tensor) not in (REPLICATE, shards.get(place))
            ]
        )
        inputs = list(tensors)
        for place, shard in shards.items():
            if not self.is_divided(tensors[place]):
                self.divide(tensors[place], shard, names[place])
            inputs[place] = self._pieces[id(tensors[place])].variable.handle
        before, self._in_use = self._in_use, True
        try:
            yield inputs
        finally:
            self._in_use = before

    def handle(self, original: Callable[[Any], Tensor], variable: Any) -> Tensor:
        """The handle of a variable that the script is about to use: it is whole then.

        ``original`` returns it. While a function is traced nothing is gathered. Raises
        what ``make_whole`` raises.
        """
        handle = original(variable)
        if self._pieces and self.is_divided(handle) and tf.executing_eagerly():
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


def _no_creator(**_: object) -> None:
    """The next creator of a variable, which is not called."""

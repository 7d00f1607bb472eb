"""Broadcast the chief's initial variables to all ranks.

Before the broadcast, the ranks compare paths, shapes and dtypes; an error names a
difference.
Every variable is broadcast once, and again when a new ``fit`` begins.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature, tensor_words
from tfcluster.runtime.collective.collectives import broadcast_bytes
from tfcluster.runtime.collective.transports.base import flat_bytes
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import Layer, Variable
from tfcluster.runtime.tensors import name_of


class InitialBroadcast:
    """Tracks which variables are already equal on all ranks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._synchronised = ObjectMap[bool]()

    def ensure(self, variables: Iterable[Variable]) -> None:
        """Broadcast the variables that were never broadcast. All ranks must call this.

        Variables that the current trace creates have no values yet. Their initializers
        have the same seed on all ranks. Raises what ``force`` raises.
        """
        missing = [v for v in _unique(variables) if v not in self._synchronised]
        if missing:
            self.force(missing)

    def force(self, variables: Iterable[Variable]) -> None:
        """Set ``variables`` to the chief's values, even from within a trace.

        Raises CollectiveMismatchError on all ranks if paths, shapes or dtypes differ,
        and another CollectiveError if a rank is lost or late.
        """
        chosen = _unique(variables)
        with tf.init_scope():
            _share_values(self._session, chosen)
        for variable in chosen:
            self._synchronised[variable] = True


def _share_values(session: Session, variables: Sequence[Variable]) -> None:
    values = [np.asarray(variable.numpy()) for variable in variables]
    signature = Signature(
        "first values of the variables",
        tuple(
            tensor_words(name_of(variable), value.dtype, value.shape)
            for variable, value in zip(variables, values, strict=True)
        ),
    )
    ours = flat_bytes(values)
    theirs = broadcast_bytes(session.group, ours, 0, signature)
    if theirs == ours:
        return
    offset = 0
    for variable, value in zip(variables, values, strict=True):
        end = offset + value.nbytes
        new = np.frombuffer(theirs[offset:end], value.dtype).reshape(value.shape)
        variable.assign(new)
        offset = end


def training_state(model: Layer) -> list[Variable]:
    """The variables of a model or layer and its optimizer, without metric variables."""
    own = {id(variable) for variable in getattr(model, "metrics_variables", ())}
    variables = [v for v in model.variables if id(v) not in own]
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        variables += optimizer.variables
    return _unique(variables)


def related_variables(trained: Sequence[Variable]) -> list[Variable]:
    """All variables of the layers that contain one of ``trained``.

    The widest layer, normally the model, comes first, so that the order is the same on
    all ranks.
    """
    wanted = {id(variable) for variable in trained}
    found = []
    for thing in gc.get_objects():
        # Not isinstance, which asks a proxy for its class: the proxied object may be
        # gone.
        if not issubclass(type(thing), keras.layers.Layer):
            continue
        variables = training_state(thing)
        if any(id(variable) in wanted for variable in variables):
            found.append((-len(variables), thing.name, variables))
    found.sort(key=lambda entry: entry[:2])
    return _unique(variable for entry in found for variable in entry[2])


def _unique(variables: Iterable[Variable]) -> list[Variable]:
    return list({id(variable): variable for variable in variables}.values())

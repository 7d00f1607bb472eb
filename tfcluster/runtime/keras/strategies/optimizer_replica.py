"""An optimizer's update, traced for the part of the variables that one ps keeps.

The program's optimizer stays as it is. One of the same class and settings is built on
variables of the pieces' shapes, and what it does to them becomes a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.strategies.optimizer_slots import (
    Slot,
    path_in_shadow,
    slots_of_shadow,
    unique,
)
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.parameter_server.placement import Piece, Variable
from tfcluster.runtime.parameter_server.update_graph import serialised

_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "RMSprop",
        "Adam",
        "AdamW",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Ftrl",
        "Lion",
        "Nadam",
    )
    if hasattr(keras.optimizers, name)
)
"""These classes, and none derived from them, treat each element by itself."""

_LOOK_AT_ALL = (
    "apply",
    "apply_gradients",
    "_clip_gradients",
    "_backend_apply_gradients",
    "_backend_update_step",
)
"""A class with one of these of its own may need all gradients at once."""

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Traits:
    """How far an optimizer's work can be divided among ps tasks."""

    splittable: bool
    """Rows of a variable may live on different ps."""
    together: bool
    """One ps needs all of the gradients."""
    rows_only: bool
    """A sparse gradient changes the rows that it names, and no others."""


def traits_of(optimizer: Any, *, clips_here: bool) -> Traits:
    """``clips_here``: gradients are clipped before they are pushed."""
    cls = type(optimizer)
    clips = bool(optimizer.clipnorm) and not clips_here
    constrained = any(
        getattr(variable, "constraint", None) is not None
        for variable in optimizer._trainable_variables
    )
    return Traits(
        splittable=cls in _ELEMENTWISE and not clips and not constrained,
        together=(bool(optimizer.global_clipnorm) and not clips_here)
        or _looks_at_all(cls),
        rows_only=_changes_rows_only(optimizer) and not constrained,
    )


def _looks_at_all(cls: type) -> bool:
    own = [base for base in cls.__mro__ if not base.__module__.startswith("keras.src.")]
    return any(name in vars(base) for base in own[:-1] for name in _LOOK_AT_ALL)


def _changes_rows_only(optimizer: Any) -> bool:
    """Plain SGD and Adagrad: no momentum that goes on, nothing done to all rows."""
    if (
        optimizer.weight_decay
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
    ):
        return False
    cls = type(optimizer)
    if cls is keras.optimizers.SGD:
        return not optimizer.momentum
    return cls is keras.optimizers.Adagrad


def described(variables: Sequence[Any], *, rows_only: bool) -> list[Variable]:
    """The variables as the ps tasks know them, by paths that differ."""
    return [
        Variable(
            path,
            tf.as_dtype(variable.dtype).name,
            tuple(int(n) for n in variable.shape),
            tf.as_dtype(variable.dtype).size,
            rows_only,
        )
        for path, variable in zip(unique(variables), variables, strict=True)
    ]


def packer(
    optimizer: Any, tracing: Callable[[], Any], *, clips_here: bool
) -> Callable[[Sequence[Piece], str], bytes]:
    """What traces ``optimizer``'s update for some pieces; called whenever one is
    wanted. ``tracing()`` is a context in which ``apply`` is Keras's own."""

    def pack(pieces: Sequence[Piece], kinds: str) -> bytes:
        with tf.init_scope(), tf.device("CPU:0"), tracing():
            shadow = _OptimizerReplica(optimizer, pieces, clips_here=clips_here)
            return serialised(shadow.apply, shadow.values, shadow.slots, kinds)

    return pack


class _OptimizerReplica:
    """An optimizer like another, for pieces of that one's variables."""

    def __init__(
        self, optimizer: Any, pieces: Sequence[Piece], *, clips_here: bool
    ) -> None:
        originals = list(optimizer._trainable_variables)
        self._variables = [
            _piece_of(originals[piece.variable], piece) for piece in pieces
        ]
        self._optimizer = _like(optimizer, clips_here=clips_here)
        _exclude_alike(optimizer, self._optimizer, originals, pieces, self._variables)
        with keras.name_scope(optimizer.name, caller=self._optimizer):
            self._optimizer.build(self._variables)
        self._optimizer.built = True
        self.values = [raw(variable) for variable in self._variables]
        slots = slots_of_shadow(optimizer, self._optimizer, pieces)
        _begin_alike(optimizer, slots)
        self.slots = {slot.path: raw(slot.variable) for slot in slots}

    def apply(self, gradients: list[Any]) -> None:
        """Update the pieces that have a gradient; a step is one for all ps alike."""
        given = [
            (gradient, variable)
            for gradient, variable in zip(gradients, self._variables, strict=True)
            if gradient is not None
        ]
        if given:
            own, variables = zip(*given, strict=True)
            self._optimizer.apply(list(own), list(variables))
        else:
            self._optimizer._iterations.assign_add(1)


def _piece_of(original: Any, piece: Piece) -> Any:
    """A Keras variable for some rows of another."""
    shape = tuple(original.shape)
    if not piece.whole:
        shape = (piece.end - piece.start, *shape[1:])
    variable = keras.Variable(
        np.zeros(shape, tf.as_dtype(original.dtype).as_numpy_dtype),
        dtype=tf.as_dtype(original.dtype).name,
        # What Keras derives its slots' names from: they say whose they are.
        name=original.name.replace("/", "_").replace(":", "_"),
    )
    variable._path = path_in_shadow(piece.variable)
    for name in ("constraint", "overwrite_with_gradient"):
        if getattr(original, name, None):
            setattr(variable, name, getattr(original, name))
    return variable


def _like(optimizer: Any, *, clips_here: bool) -> Any:
    """A new optimizer of the same class, with the same settings."""
    config = dict(optimizer.get_config())
    rate = optimizer._learning_rate
    if "learning_rate" in config:
        # A schedule or a function as it is: its class may not be known to Keras.
        fixed = isinstance(rate, keras.Variable)
        config["learning_rate"] = float(rate.numpy()) if fixed else rate
    try:
        shadow = type(optimizer).from_config(config)
    except Exception as error:
        raise CollectiveError(
            f"the optimizer {type(optimizer).__name__} cannot be recreated for the "
            f"parameter servers: {error}. Its get_config() must return the arguments "
            "of its __init__"
        ) from error
    for name, value in vars(optimizer).items():
        # What a class of the program's own keeps, and does not tell in its config.
        if isinstance(value, _PLAIN) and isinstance(
            vars(shadow).get(name, value), _PLAIN
        ):
            vars(shadow)[name] = value
    vars(shadow)["built"] = False
    shadow.name = optimizer.name
    # Those who push divide by it.
    shadow.loss_scale_factor = None
    if clips_here:
        shadow.clipnorm = shadow.clipvalue = shadow.global_clipnorm = None
    return shadow


def _exclude_alike(
    optimizer: Any,
    shadow: Any,
    originals: Sequence[Any],
    pieces: Sequence[Piece],
    variables: Sequence[Any],
) -> None:
    """Spare the same variables from weight decay."""
    if not optimizer.weight_decay:
        return
    shadow._exclude_from_weight_decay_cache = {}
    shadow._exclude_from_weight_decay = {
        shadow._var_key(variable)
        for piece, variable in zip(pieces, variables, strict=True)
        if not optimizer._use_weight_decay(raw(originals[piece.variable]))
    }
    shadow._exclude_from_weight_decay_pattern = None


def _begin_alike(optimizer: Any, slots: Sequence[Slot]) -> None:
    """Slots begin with what the program's optimizer has: it may have been loaded."""
    originals = optimizer.variables
    known = dict(zip(unique(originals), originals, strict=True))
    for slot in slots:
        if slot.path not in known:
            continue
        value = np.asarray(known[slot.path].numpy())
        if value.shape != tuple(slot.variable.shape):
            if slot.piece is None:
                continue
            value = value[slot.piece.start : slot.piece.end]
        raw(slot.variable).assign(value)

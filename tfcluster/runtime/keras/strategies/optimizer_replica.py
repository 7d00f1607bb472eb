"""Traces an optimizer's update for the part of the variables that one ps keeps.

The program's optimizer is not changed. A replica of the same class with the same
settings is built on variables of the pieces' shapes, and its update is traced into a
graph. The replica's slot variables are matched with those of the optimizer by name,
since Keras derives it from the name of the trained variable, and by order if several
variables have the same path.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import KerasVariable, Optimizer
from tfcluster.runtime.parameter_server.sharding import ModelVariable, VariablePiece
from tfcluster.runtime.parameter_server.update_graph import serialised
from tfcluster.runtime.tensor_types import Gradient
from tfcluster.runtime.tensors import name_of

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
"""Exactly these classes, not their subclasses, update each element independently."""

_NAMELESS = re.compile(r"variable(_\d+)?")
_IN_REPLICA = re.compile(r"tfcluster(\d+)_(.+)")

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Traits:
    """How far an optimizer's update can be divided among ps tasks."""

    splittable: bool
    """Whether rows of one variable may be on different ps tasks."""
    together: bool
    """Whether one ps task needs all gradients."""
    rows_only: bool
    """Whether a sparse gradient changes only the rows that it names."""


def traits_of(optimizer: Optimizer, *, clips_here: bool) -> Traits:
    """An optimizer's traits; ``clips_here``: gradients are clipped before a push."""
    cls = type(optimizer)
    clips = bool(optimizer.clipnorm) and not clips_here
    constrained = any(
        getattr(variable, "constraint", None) is not None
        for variable in internals.trained_variables(optimizer)
    )
    return Traits(
        splittable=cls in _ELEMENTWISE and not clips and not constrained,
        together=(bool(optimizer.global_clipnorm) and not clips_here)
        or _looks_at_all(cls),
        rows_only=_changes_rows_only(optimizer) and not constrained,
    )


def _looks_at_all(cls: type) -> bool:
    own = [base for base in cls.__mro__ if not internals.is_of_keras(base)]
    names = internals.UPDATE_METHODS
    return any(name in vars(base) for base in own[:-1] for name in names)


def _changes_rows_only(optimizer: Optimizer) -> bool:
    """Whether this is plain SGD or Adagrad: no momentum, no change to other rows."""
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


def described(
    variables: Sequence[KerasVariable], *, rows_only: bool
) -> list[ModelVariable]:
    """The variables as the ps tasks know them, with unique paths."""
    return [
        ModelVariable(
            path,
            tf.as_dtype(variable.dtype).name,
            tuple(int(n) for n in variable.shape),
            tf.as_dtype(variable.dtype).size,
            rows_only,
        )
        for path, variable in zip(unique(variables), variables, strict=True)
    ]


def packer(
    optimizer: Optimizer,
    *,
    clips_here: bool,
) -> Callable[[Sequence[VariablePiece], str], bytes]:
    """Return a function that traces ``optimizer``'s update for some pieces and
    serialises it.

    The function returns what ``update_graph.serialised`` returns. It raises
    UntraceableError, or CollectiveError for an optimizer that cannot be recreated.
    """

    def pack(pieces: Sequence[VariablePiece], kinds: str) -> bytes:
        plain = tf.variable_creator_scope(tf_internals.plain_variable)
        with tf.init_scope(), tf.device("CPU:0"), plain:
            replica = _OptimizerReplica(optimizer, pieces, clips_here=clips_here)
            return serialised(replica.apply, replica.values, replica.slots, kinds)

    return pack


class _OptimizerReplica:
    """A replica of an optimizer, for pieces of that optimizer's variables."""

    def __init__(
        self, optimizer: Optimizer, pieces: Sequence[VariablePiece], *, clips_here: bool
    ) -> None:
        originals = internals.trained_variables(optimizer)
        self._variables = [
            _piece_of(originals[piece.variable], piece) for piece in pieces
        ]
        self._optimizer = _like(optimizer, clips_here=clips_here)
        if optimizer.weight_decay:
            # Exclude the same variables from it.
            self._optimizer.exclude_from_weight_decay(
                [
                    variable
                    for piece, variable in zip(pieces, self._variables, strict=True)
                    if not internals.decays(optimizer, raw(originals[piece.variable]))
                ]
            )
        with keras.name_scope(optimizer.name, caller=self._optimizer):
            self._optimizer.build(self._variables)
        self._optimizer.built = True
        self.values = [raw(variable) for variable in self._variables]
        slots = slots_of_replica(optimizer, self._optimizer, pieces)
        _begin_alike(optimizer, slots)
        self.slots = {slot.path: raw(slot.variable) for slot in slots}

    def apply(self, gradients: list[Gradient]) -> None:
        """Update the pieces that have a gradient; always count the step."""
        pairs = [
            (gradient, variable)
            for gradient, variable in zip(gradients, self._variables, strict=True)
            if gradient is not None
        ]
        if pairs:
            own, variables = zip(*pairs, strict=True)
            # Without our hooks. A class that overrides ``apply`` has changed the
            # gradients already.
            apply = contract.original_of(patches.OPTIMIZER_APPLY)
            apply(self._optimizer, list(own), list(variables))
        else:
            internals.iterations_of(self._optimizer).assign_add(1)


def _piece_of(original: KerasVariable, piece: VariablePiece) -> KerasVariable:
    """A Keras variable for some rows of another one."""
    shape = tuple(original.shape)
    if not piece.whole:
        shape = (piece.end - piece.start, *shape[1:])
    variable: KerasVariable = keras.Variable(
        np.zeros(shape, tf.as_dtype(original.dtype).as_numpy_dtype),
        dtype=tf.as_dtype(original.dtype).name,
        # Keras derives the slots' names from this name; we derive their owner from
        # those names.
        name=original.name.replace("/", "_").replace(":", "_"),
    )
    internals.set_path(variable, path_in_replica(piece.variable))
    if getattr(original, "constraint", None):
        variable.constraint = original.constraint
    if getattr(original, "overwrite_with_gradient", None):
        variable.overwrite_with_gradient = original.overwrite_with_gradient
    return variable


def _like(optimizer: Optimizer, *, clips_here: bool) -> Optimizer:
    """A new optimizer of the same class with the same settings.

    Raises CollectiveError if its configuration does not recreate it.
    """
    config = dict(optimizer.get_config())
    rate = internals.rate_of(optimizer)
    if "learning_rate" in config:
        # Keep a schedule or function as it is: Keras may not know its class.
        fixed = isinstance(rate, keras.Variable)
        config["learning_rate"] = float(rate.numpy()) if fixed else rate
    try:
        replica = type(optimizer).from_config(config)
    except Exception as error:
        raise CollectiveError(
            f"the optimizer {type(optimizer).__name__} cannot be recreated for the "
            f"parameter servers: {error}. Its get_config() must return the arguments "
            "of its __init__"
        ) from error
    for name, value in vars(optimizer).items():
        # These are settings of a custom class that its config does not contain. Their
        # names are unknown, so all plain values are copied, including Keras's private
        # attributes. This relies on no name of Keras.
        if isinstance(value, _PLAIN) and isinstance(
            vars(replica).get(name, value), _PLAIN
        ):
            vars(replica)[name] = value
    vars(replica)["built"] = False
    replica.name = optimizer.name
    # The ranks divide gradients by the loss scale before they push them.
    replica.loss_scale_factor = None
    if clips_here:
        replica.clipnorm = replica.clipvalue = replica.global_clipnorm = None
    return replica


def _begin_alike(optimizer: Optimizer, slots: Sequence[Slot]) -> None:
    """Copy the slots of the program's optimizer, which may have been loaded."""
    originals = optimizer.variables
    by_path = dict(zip(unique(originals), originals, strict=True))
    for slot in slots:
        if slot.path not in by_path:
            continue
        value = np.asarray(by_path[slot.path].numpy())
        if value.shape != tuple(slot.variable.shape):
            if slot.piece is None:
                continue
            value = value[slot.piece.start : slot.piece.end]
        raw(slot.variable).assign(value)


# --- slot variables ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """One of a replica's variables."""

    path: str
    """The path of the corresponding variable of the program's optimizer."""
    variable: KerasVariable
    piece: VariablePiece | None
    """The piece to which it belongs; None if it belongs to no trained variable."""


def path_in_replica(index: int) -> str:
    """The path of a replica's piece of the variable at this index."""
    return f"tfcluster{index}"


def unique(variables: Iterable[KerasVariable]) -> list[str]:
    """The variables' paths; repeated paths get a number."""
    seen: Counter[str] = Counter()
    paths = []
    for variable in variables:
        path = name_of(variable)
        seen[path] += 1
        paths.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return paths


def slots_of_replica(
    optimizer: Optimizer, replica: Optimizer, pieces: Sequence[VariablePiece]
) -> list[Slot]:
    """Match each variable of ``replica`` with one of ``optimizer``'s.

    ``pieces`` are the pieces for which the replica was built, in the same order.
    """
    originals = optimizer.variables
    paths = unique(originals)
    by_name: dict[str, list[str]] = defaultdict(list)
    for path, variable in zip(paths, originals, strict=True):
        by_name[_last(variable)].append(path)
    trained = internals.trained_variables(optimizer)
    prefixes = [_prefix(variable) for variable in trained]
    place = {piece.variable: piece for piece in pieces}
    counts = Counter(_last(variable) for variable in replica.variables)
    seen: Counter[str] = Counter()
    slots = []
    for variable in replica.variables:
        name, piece = _last(variable), None
        number = seen[name]
        seen[name] += 1
        if match := _IN_REPLICA.fullmatch(name):
            index = int(match[1])
            piece = place[index]
            candidates = by_name[f"{prefixes[index]}_{match[2]}"]
            number = prefixes[:index].count(prefixes[index])
        else:
            candidates = by_name[name]
            if counts[name] == len(pieces) and len(candidates) == len(trained) > 1:
                # There is one per trained variable, and all have the same name.
                piece = pieces[number]
                number = piece.variable
        path = candidates[number] if number < len(candidates) else f"{name}#own{number}"
        slots.append(Slot(path, variable, piece))
    return slots


def _last(variable: KerasVariable) -> str:
    name = name_of(variable).rpartition("/")[2]
    # Keras numbers nameless variables (Nadam's) consecutively.
    return "variable" if _NAMELESS.fullmatch(name) else name


def _prefix(variable: KerasVariable) -> str:
    """The prefix that Keras gives to the names of a variable's slots."""
    if hasattr(variable, "path"):
        return str(variable.path).replace("/", "_")
    return str(variable.name).replace("/", "_").replace(":", "_")

"""Reads what the divergence check compares: weights and optimizer hyperparameters.

Keeps no variable or optimizer alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import rank_divergence
from tfcluster.runtime.collective.rank_divergence import Chunk
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import name_of

MAX_LABELS = 200
"""The most summaries that a rank sends at the end of its program."""
_MAX_SCALARS = 8
_MAX_LABEL = 100


class Weights:
    """Variables that are trained together."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        readable = {
            name_of(variable)[-_MAX_LABEL:]: variable
            for variable in variables
            if _is_readable(variable)
        }
        self._all = [weakref.ref(raw(variable)) for variable in variables]
        self.labels = list(readable)
        self._refs = [weakref.ref(raw(variable)) for variable in readable.values()]
        self._sizes = [int(np.prod(v.shape)) for v in readable.values()]
        self._widths = [tf.as_dtype(v.dtype).size for v in readable.values()]

    def are(self, variables: Sequence[Variable]) -> bool:
        """Whether these weights are exactly ``variables``."""
        return len(self._all) == len(variables) and all(
            ref() is raw(variable)
            for ref, variable in zip(self._all, variables, strict=True)
        )

    @property
    def on_cpu(self) -> bool:
        """Whether all weights can be read without a copy."""
        found = (ref() for ref in self._refs)
        return all("GPU" not in v.device for v in found if v is not None)

    def read(self) -> list[Tensor]:
        """The value of each variable that still exists."""
        found = (ref() for ref in self._refs)
        return [_read(variable) for variable in found if variable is not None]

    def next_chunks(self, begin: Chunk) -> rank_divergence.Chunks:
        """The chunks to compare next, from position ``begin`` on."""
        return rank_divergence.next_chunks(self._sizes, self._widths, begin)

    def part(self, chunk: Chunk, values: Sequence[Array]) -> Array | None:
        """A chunk of a weight, as a vector; None if the variable is gone.

        It is taken from ``values``, the results of ``read``, if they are complete, and
        otherwise read now.
        """
        if len(values) == len(self._refs):
            value = np.asarray(values[chunk.place])
            return value.reshape(-1)[chunk.start : chunk.stop]
        variable = self._refs[chunk.place]()
        return None if variable is None else _value(variable, chunk.start, chunk.stop)

    def summaries(self) -> dict[str, str]:
        """A summary of each weight by label, or of groups if there are many weights.

        Returns at most ``MAX_LABELS`` summaries. Weights that are gone are left out.
        """
        found = {}
        each = -(-len(self.labels) // MAX_LABELS) or 1
        for start in range(0, len(self.labels), each):
            labels = self.labels[start : start + each]
            references = self._refs[start : start + each]
            group = [v for ref in references if (v := ref()) is not None]
            if len(group) < len(references):
                continue
            more = f" (or one of the {len(labels) - 1} after it)"
            label = labels[0] + (more if len(labels) > 1 else "")
            found[label] = rank_divergence.summary([_value(v) for v in group])
        return found


class Hyperparameters:
    """An optimizer's hyperparameters: learning rate, momentum, ..."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name = name
        self._optimizer = weakref.ref(optimizer)
        self._numbers = _numbers(optimizer)
        scalars = [v for v in optimizer.variables if _is_scalar(v)]
        self._scalars = {
            _scalar_label(name, optimizer, variable): weakref.ref(raw(variable))
            for variable in scalars[:_MAX_SCALARS]
        }

    def read(self) -> list[Tensor]:
        """Tensors of the hyperparameters that are variables."""
        found = (ref() for ref in self._scalars.values())
        return [_read(variable) for variable in found if variable is not None]

    def texts(self, scalars: Sequence[Tensor | Array]) -> dict[str, str]:
        """Hyperparameters as text, by label; ``scalars`` are the values of ``read``."""
        texts = {}
        if len(scalars) == len(self._scalars):
            values = [rank_divergence.text_of(np.asarray(value)) for value in scalars]
            texts = dict(zip(self._scalars, values, strict=True))
        optimizer = self._optimizer()
        for owner, key in self._numbers if optimizer is not None else ():
            holder = optimizer if owner is None else getattr(optimizer, owner)
            value = getattr(holder, key)
            if isinstance(value, int | float):
                texts[f"{key} of {self._name}"] = rank_divergence.text_of(value)
        return texts


def _numbers(optimizer: Optimizer) -> list[tuple[str | None, str]]:
    """The optimizer's numeric constructor arguments.

    Returns pairs: the attribute name of the inner optimizer that holds the argument (or
    None), and the argument's key.
    """
    found: list[tuple[str | None, str]] = []
    inner = getattr(optimizer, "inner_optimizer", None)
    for owner, holder in ((None, optimizer), ("inner_optimizer", inner)):
        if holder is None:
            continue
        # get_config reads variables, and may fail in a custom class.
        with contextlib.suppress(Exception), tf.init_scope():
            found += [(owner, k) for k in holder.get_config() if k in vars(holder)]
    return found


def _scalar_label(name: str, optimizer: Optimizer, variable: Variable) -> str:
    owner, _, last = name_of(variable).rpartition("/")
    return f"{last} of {name if owner in ('', optimizer.name) else owner}"


def _is_scalar(variable: Variable) -> bool:
    # The truth value of a TensorShape would say whether the shape is known.
    return len(variable.shape) == 0 and _is_readable(variable)


def _is_readable(variable: Variable) -> bool:
    plain = raw(variable)
    return (
        isinstance(plain, tf.Variable)
        and not isinstance(plain, tf.distribute.DistributedValues)
        and plain.dtype != tf.string
    )


def _read(variable: TfVariable) -> Tensor:
    plain = raw(variable)
    return tf.raw_ops.ReadVariableOp(resource=plain.handle, dtype=plain.dtype)


def _value(variable: TfVariable, start: int = 0, stop: int | None = None) -> Array:
    """The elements of a variable from ``start`` to ``stop``; on a CPU not a copy."""
    tensor = _read(variable)
    if "CPU" in tensor.device:
        return np.asarray(tensor).reshape(-1)[start:stop]
    return np.asarray(tf.reshape(tensor, [-1])[start:stop])

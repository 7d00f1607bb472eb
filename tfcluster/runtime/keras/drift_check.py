"""Notices ranks that do not train the same model any more.

With every exchange of gradients travels a digest of what the optimizer was told (its
learning rate, ...) and, every few steps, of a part of the weights. It costs no message
of its own. Only where the digests differ do the ranks tell each other more. What the
last steps have left is compared when the programs end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import consistency
from tfcluster.runtime.collective import CollectiveError, Layout
from tfcluster.runtime.collective.operations import gather_bytes
from tfcluster.runtime.collective.transport import Array
from tfcluster.runtime.consistency import Chunk
from tfcluster.runtime.keras.gradients import name_of
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.slots import raw

_NOTE_BYTES = 8
_FIRST_STEPS, _EVERY = (1, 2, 4), 8
"""Weights are looked at in these steps, and then in every eighth."""
_EVERY_AFTER_ROUNDING = 64
_MAX_SCALARS = 8
_MAX_LABELS = 200
"""In what a rank tells at its end: that is one small message."""
_MAX_LABEL = 100


class Watched:
    """What one optimizer trains and was told; it keeps none of it alive."""

    def __init__(self, name: str, optimizer: Any, variables: Sequence[Any]) -> None:
        self._name = name
        self._optimizer = weakref.ref(optimizer)
        self._numbers = _numbers(optimizer)
        scalars = [v for v in optimizer.variables if _is_scalar(v)]
        self._scalars = {
            _scalar_label(name, optimizer, variable): weakref.ref(variable)
            for variable in scalars[:_MAX_SCALARS]
        }
        weights = {
            name_of(variable)[-_MAX_LABEL:]: variable
            for variable in variables
            if _is_readable(variable)
        }
        self.labels = list(weights)
        self._weights = [weakref.ref(variable) for variable in weights.values()]
        self._sizes = [int(np.prod(v.shape)) for v in weights.values()]
        self._widths = [tf.as_dtype(v.dtype).size for v in weights.values()]

    def scalars(self) -> list[Any]:
        """The optimizer's numbers that are variables, read now."""
        found = (ref() for ref in self._scalars.values())
        return [_read(variable) for variable in found if variable is not None]

    @property
    def on_cpu(self) -> bool:
        """Whether reading all weights copies none of them."""
        found = (ref() for ref in self._weights)
        return all("GPU" not in raw(v).device for v in found if v is not None)

    def weights_read(self) -> list[Any]:
        found = (ref() for ref in self._weights)
        return [_read(variable) for variable in found if variable is not None]

    def hyperparameters(self, scalars: Sequence[Any]) -> dict[str, str]:
        """``scalars`` as they were read."""
        told = {}
        if len(scalars) == len(self._scalars):
            texts = [consistency.text_of(np.asarray(value)) for value in scalars]
            told = dict(zip(self._scalars, texts, strict=True))
        optimizer = self._optimizer()
        for owner, key in self._numbers if optimizer is not None else ():
            holder = optimizer if owner is None else getattr(optimizer, owner)
            value = getattr(holder, key)
            if isinstance(value, int | float):
                told[f"{key} of {self._name}"] = consistency.text_of(value)
        return told

    def next_chunks(self, begin: Chunk) -> consistency.Chunks:
        return consistency.next_chunks(self._sizes, self._widths, begin)

    def part(self, chunk: Chunk, values: Sequence[Any]) -> Array | None:
        """Of ``values``, those of all weights, if they were read before."""
        if len(values) == len(self._weights):
            value = np.asarray(values[chunk.place])
            return value.reshape(-1)[chunk.start : chunk.stop]
        variable = self._weights[chunk.place]()
        return None if variable is None else _value(variable, chunk.start, chunk.stop)

    def weights(self) -> dict[str, str]:
        """A summary of each; of several together where there are very many."""
        found = {}
        each = -(-len(self.labels) // _MAX_LABELS) or 1
        for start in range(0, len(self.labels), each):
            labels = self.labels[start : start + each]
            group = [ref() for ref in self._weights[start : start + each]]
            if any(variable is None for variable in group):
                continue
            more = f" (or one of the {len(labels) - 1} after it)"
            label = labels[0] + (more if len(labels) > 1 else "")
            found[label] = consistency.summary([_value(v) for v in group])
        return found


@dataclass
class _Training:
    """How far the comparison of what one optimizer trains has come."""

    name: str
    optimizer: Callable[[], Any]
    """None, once it is gone."""
    watched: Watched | None = None
    ids: tuple[int, ...] = ()
    steps: int = 0
    position: Chunk = field(default_factory=lambda: Chunk(0, 0, 0))
    every: int = _EVERY
    equal: dict[str, int] = field(default_factory=dict)
    """The last step in which each was the same on all ranks, by label."""


class DriftCheck:
    """Of all optimizers whose gradients this process exchanges."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainings: dict[str, _Training] = {}
        self._told_of = _Training("", lambda: None)
        self._left_behind: dict[str, str] = {}
        """By optimizers that are gone."""
        self._ended = False

    def watch(
        self,
        name: str,
        optimizer: Any,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        *,
        may_move: bool = False,
    ) -> Watch:
        """Called for every trace, eagerly for every step.

        ``name`` is the optimizer's, the same on all ranks. Only variables with a
        gradient are compared. With ``may_move`` the program may assign to them during
        the exchange, so their values are read before it.
        """
        chosen = [
            variable
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
        ]
        training = self._of(name, optimizer)
        ids = tuple(map(id, chosen))
        if training.watched is None or training.ids != ids:
            training.watched = Watched(name, optimizer, chosen)
            training.ids = ids
        return Watch(self._session, training, training.watched, may_move=may_move)

    def look_at(self, optimizers: Sequence[tuple[str, Any]], steps: int) -> Look:
        """At what optimizers were told, for strategies that average no gradients.

        Of those that are gone (None) on a rank, nothing is compared.
        """
        told: dict[str, str] = {}
        for name, optimizer in optimizers:
            if optimizer is None:
                continue
            training = self._of(name, optimizer)
            training.watched = training.watched or Watched(name, optimizer, ())
            watched = training.watched
            told |= watched.hyperparameters(watched.scalars())
        names = ", ".join(name for name, _ in optimizers)
        self._told_of.name, self._told_of.steps = names, steps
        return Look(self._session, self._told_of, told, {})

    def last_state(self) -> dict[str, str]:
        """What the programs of all ranks have in common as they end; asked once."""
        if self._session.group.failure is None:
            for name in list(self._trainings):
                self._leave_behind(name)
        self._ended = True
        return dict(list(self._left_behind.items())[-_MAX_LABELS:])

    def last_equal(self) -> dict[str, int]:
        """The last step in which each was seen to be the same, by label."""
        return {
            label: step
            for training in self._trainings.values()
            for label, step in training.equal.items()
        }

    def _of(self, name: str, optimizer: Any) -> _Training:
        training = self._trainings.get(name)
        if training is None or training.optimizer() is not optimizer:
            ref = weakref.ref(optimizer, lambda _: self._leave_behind(name))
            training = self._trainings[name] = _Training(name, ref)
        return training

    def _leave_behind(self, name: str) -> None:
        """Note what there is at the end of a training, or of its optimizer."""
        training = self._trainings[name]
        if self._ended or training.watched is None or not training.steps:
            return
        # Not worth an error: an optimizer may go at any time.
        with contextlib.suppress(Exception), tf.init_scope():
            watched = training.watched
            self._left_behind |= watched.hyperparameters(watched.scalars())
            self._left_behind |= watched.weights()


class Watch:
    """Stands beside the exchanges of one trace."""

    def __init__(
        self,
        session: Session,
        training: _Training,
        watched: Watched,
        *,
        may_move: bool,
    ) -> None:
        self._session = session
        self._training = training
        self._watched = watched
        self._scalars = 0
        self._carried = may_move and watched.on_cpu
        # Values that a GPU would have to copy in every step are compared at the end.
        self._compares_weights = self._carried or not may_move

    def inputs(self) -> list[Any]:
        """What ``look`` is to be given, as tensors."""
        scalars = self._watched.scalars()
        self._scalars = len(scalars)
        return scalars + (self._watched.weights_read() if self._carried else [])

    def before(self) -> list[Any]:
        """Ops that come first: no assignment is going on during an exchange, then."""
        if self._carried or not self._compares_weights or not tf.inside_function():
            return []
        return self._watched.weights_read()

    def look(self, *inputs: Any) -> Look:
        """At what this rank has, right before an exchange."""
        training, watched = self._training, self._watched
        training.steps += 1
        told = watched.hyperparameters(inputs[: self._scalars])
        weights = inputs[self._scalars :]
        parts: dict[str, Array] = {}
        due = training.steps in _FIRST_STEPS or training.steps % training.every == 0
        if self._compares_weights and due:
            found = watched.next_chunks(training.position)
            training.position = found.following
            for chunk in found.chunks:
                part = watched.part(chunk, weights)
                if part is not None:
                    parts[watched.labels[chunk.place]] = part
        return Look(self._session, training, told, parts)


class Look:
    """What is compared with one exchange; see ``operations.Check``."""

    def __init__(
        self,
        session: Session,
        training: _Training,
        told: Mapping[str, str],
        parts: Mapping[str, Array],
    ) -> None:
        self._session = session
        self._training = training
        self._parts = parts
        sums = {label: f"{consistency.checksum(a):x}" for label, a in parts.items()}
        self._told = {**told, **sums}
        text = json.dumps(list(self._told.items())).encode()
        self.note = hashlib.blake2b(text, digest_size=_NOTE_BYTES).digest()

    def compared(self, *, equal: bool) -> None:
        """Raises CollectiveError on all ranks where they have drifted apart."""
        if not equal:
            self._explain()
        self._training.equal |= dict.fromkeys(self._told, self._training.steps)

    def _explain(self) -> None:
        name, steps = self._training.name, self._training.steps
        layout = Layout(f"what {name} trains")
        group = self._session.group
        sent = gather_bytes(group, json.dumps(self._told).encode(), layout)
        told = [json.loads(data) for data in sent]
        label = consistency.differing(told)
        if label is None:
            return
        when = f"in step {steps} of {name}"
        last = consistency.equal_text(self._training.equal.get(label, 0))
        if label not in self._parts:
            values = {rank: found[label] for rank, found in enumerate(told)}
            raise self._refusal(
                consistency.hyperparameter_text(label, values, when, last)
            )
        part = self._parts[label]
        away, rank = self._farthest(part, Layout(f"what {label} is"))
        if away <= consistency.rounding_of(part.dtype.itemsize):
            self._training.every = _EVERY_AFTER_ROUNDING
            self._session.warn(consistency.rounding_text(label, away))
            return
        ranks = f"rank 0 and rank {rank}"
        raise self._refusal(consistency.weights_text(label, ranks, away, when, last))

    def _farthest(self, part: Array, layout: Layout) -> tuple[float, int]:
        """How far the ranks' arrays are from the chief's, and the farthest rank."""
        sent = gather_bytes(self._session.group, part.tobytes(), layout)
        arrays = [np.frombuffer(data, part.dtype) for data in sent]
        away = [consistency.distance(arrays[0], array) for array in arrays]
        rank = int(np.argmax(away))
        return away[rank], rank

    def _refusal(self, text: str) -> CollectiveError:
        # TensorFlow makes text of what is raised within an op: it is looked up here.
        refusal = self._session.group.refusal = CollectiveError(text)
        return refusal


def _numbers(optimizer: Any) -> list[tuple[str | None, str]]:
    """Plain numbers that its constructor was given: (attribute of it or None, key)."""
    found: list[tuple[str | None, str]] = []
    inner = getattr(optimizer, "inner_optimizer", None)
    for owner, holder in ((None, optimizer), ("inner_optimizer", inner)):
        if holder is None:
            continue
        # It reads variables. Of a class of the program's own it may fail.
        with contextlib.suppress(Exception), tf.init_scope():
            found += [(owner, k) for k in holder.get_config() if k in vars(holder)]
    return found


def _scalar_label(name: str, optimizer: Any, variable: Any) -> str:
    owner, _, last = name_of(variable).rpartition("/")
    return f"{last} of {name if owner in ('', optimizer.name) else owner}"


def _is_scalar(variable: Any) -> bool:
    # Not by the truth of a TensorShape: that tells whether it is known.
    return len(variable.shape) == 0 and _is_readable(variable)


def _is_readable(variable: Any) -> bool:
    plain = raw(variable)
    return (
        isinstance(plain, tf.Variable)
        and not isinstance(plain, tf.distribute.DistributedValues)
        and plain.dtype != tf.string
    )


def _read(variable: Any) -> Any:
    plain = raw(variable)
    return tf.raw_ops.ReadVariableOp(resource=plain.handle, dtype=plain.dtype)


def _value(variable: Any, start: int = 0, stop: int | None = None) -> Array:
    """The elements of a variable from ``start`` on: not a copy, on a CPU."""
    tensor = _read(variable)
    if "CPU" in tensor.device:
        return np.asarray(tensor).reshape(-1)[start:stop]
    return np.asarray(tf.reshape(tensor, [-1])[start:stop])

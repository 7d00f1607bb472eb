"""Detects ranks that no longer train the same model.

Every all-reduce of gradients carries a digest of the optimizer's hyperparameters and,
every few steps, of a part of the weights; that costs no additional message. Only if the
digests differ do the ranks exchange more. The final state is compared when the programs
end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature, rank_divergence
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.rank_divergence import Chunk
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.checks.weight_digests import (
    MAX_LABELS,
    Hyperparameters,
    Weights,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.tensor_types import Tensor

_DIGEST_BYTES = 4
"""A note consists of two digests: of the hyperparameters and of the weights."""
_NOTHING = bytes(_DIGEST_BYTES)
_FIRST_STEPS, _EVERY = (1, 2, 4), 8
"""Weights are compared in these steps, and then in every eighth."""
_EVERY_AFTER_ROUNDING = 64

Owner = Callable[[], tuple[str, Optimizer] | None]
"""Returns the optimizer that applies some gradients and its name, or None while the
optimizer is not known. The name is equal on all ranks. Called when an exchange runs,
because the ranks may have traced their graphs at different times."""


@dataclass
class _Training:
    """The state of the comparison for one optimizer."""

    name: str
    optimizer: Callable[[], Optimizer | None]
    """Returns None when the optimizer is gone."""
    weights: Weights | None = None
    hyperparameters: Hyperparameters | None = None
    steps: int = 0
    position: Chunk = field(default_factory=lambda: Chunk(0, 0, 0))
    every: int = _EVERY
    equal: dict[str, int] = field(default_factory=dict)
    """By label: the last step in which the value was equal on all ranks."""


class DivergenceCheck:
    """Compares the ranks for all optimizers whose gradients this process exchanges."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainings: dict[str, _Training] = {}
        self._unowned: dict[str, _Training] = {}
        """States by the names of gradients whose optimizer is not known yet."""
        self._not_averaged = _Training("", lambda: None)
        self._final_state: dict[str, str] = {}
        """The final state of optimizers that are gone, by label."""
        self._ended = False

    def watch(
        self,
        owner: Owner,
        what: str,
        variables: Sequence[Variable],
    ) -> Watch:
        """Create the watch of one trace, or of one eager step.

        ``what`` names the gradients; it is equal on all ranks. ``variables`` are the
        variables that have a gradient.
        """
        known = owner()
        training = self.training(*known) if known else self.without_owner(what)
        weights = training.weights
        # Eager steps call this every time, with the same variables.
        if weights is None or not weights.are(variables):
            weights = training.weights = Weights(variables)
        hyperparameters = training.hyperparameters
        return Watch(self, owner, what, weights, hyperparameters, self._session)

    def hyperparameters(self, name: str, optimizer: Optimizer | None) -> list[Tensor]:
        """An optimizer's hyperparameters: scalar tensors, for ``look_at``."""
        if optimizer is None:
            return []
        found = self.training(name, optimizer).hyperparameters
        return [] if found is None else found.read()

    def look_at(
        self,
        optimizers: Sequence[tuple[str, Optimizer | None]],
        steps: int,
        scalars: Sequence[Array] | None = None,
    ) -> Look:
        """Compare hyperparameters, for strategies that average no gradients.

        ``optimizers`` are pairs of a name, equal on all ranks, and an optimizer.
        Optimizers that are gone (None) on a rank are not compared. ``scalars`` are the
        values of ``hyperparameters`` of the only optimizer. They are needed in a graph,
        which may change the variables before or after this call; without them, the
        variables are read now. The result's ``compared`` raises CollectiveError on all
        ranks if they differ.
        """
        texts: dict[str, str] = {}
        for name, optimizer in optimizers:
            if optimizer is None:
                continue
            found = self.training(name, optimizer).hyperparameters
            if found is not None:
                texts |= found.texts(found.read() if scalars is None else scalars)
        names = ", ".join(name for name, _ in optimizers)
        self._not_averaged.name, self._not_averaged.steps = names, steps
        return Look(self._session, self._not_averaged, texts, {})

    def last_state(self) -> dict[str, str]:
        """The state to compare when the programs end, as text by label.

        Must be called only once.
        """
        if self._session.group.failure is None:
            for name in list(self._trainings):
                self._record_final_state(name)
        self._ended = True
        return dict(list(self._final_state.items())[-MAX_LABELS:])

    def last_equal(self) -> dict[str, int]:
        """By label: the last step in which the value was seen to be equal."""
        return {
            label: step
            for training in (*self._unowned.values(), *self._trainings.values())
            for label, step in training.equal.items()
        }

    def training(self, name: str, optimizer: Optimizer) -> _Training:
        """The state for ``optimizer``, which has this name on all ranks."""
        training = self._trainings.get(name)
        if training is None or training.optimizer() is not optimizer:
            ref = weakref.ref(optimizer, lambda _: self._record_final_state(name))
            training = self._trainings[name] = _Training(name, ref)
        if training.hyperparameters is None:
            training.hyperparameters = Hyperparameters(name, optimizer)
        return training

    def without_owner(self, what: str) -> _Training:
        """The state for gradients that no optimizer has applied yet."""
        return self._unowned.setdefault(what, _Training(what, lambda: None))

    # Python removes the names of modules at its end, and deletes optimizers later.
    _is_shutdown = staticmethod(sys.is_finalizing)

    def _record_final_state(self, name: str) -> None:
        """Record the final state of a training or of its optimizer."""
        training = self._trainings[name]
        if self._ended or not training.steps or self._is_shutdown():
            return
        # Not worth an error: an optimizer may be deleted at any time.
        with contextlib.suppress(Exception), tf.init_scope():
            if training.hyperparameters is not None:
                found = training.hyperparameters
                self._final_state |= found.texts(found.read())
            if training.weights is not None:
                self._final_state |= training.weights.summaries()


class Watch:
    """Compares the ranks in the exchanges of one trace."""

    def __init__(
        self,
        divergence_check: DivergenceCheck,
        owner: Owner,
        what: str,
        weights: Weights,
        hyperparameters: Hyperparameters | None,
        session: Session,
    ) -> None:
        self._divergence_check = divergence_check
        self._owner = owner
        self._what = what
        self._weights = weights
        self._hyperparameters = hyperparameters
        self._session = session
        self._scalars = 0
        # In a graph, weights may be assigned during the exchange, for example by weight
        # decay. So their values are read before it, in the graph, and passed in.
        # Weights that would have to be copied from a GPU are compared only when the
        # program ends.
        in_graph = bool(tf.inside_function())
        self._carries = in_graph and weights.on_cpu
        self._compares_weights = self._carries or not in_graph

    def inputs(self) -> list[Tensor]:
        """The tensors whose values ``look`` needs: hyperparameters, then weights."""
        found = self._hyperparameters
        scalars = [] if found is None else found.read()
        self._scalars = len(scalars)
        return scalars + (self._weights.read() if self._carries else [])

    def look(self, *inputs: Array) -> Look:
        """Look at this rank's state right before an exchange.

        ``inputs`` are the values of the tensors that the method ``inputs`` returned.
        """
        training = self._training()
        return self._look(training, inputs, due=self._is_due(training))

    def settings(self) -> list[Tensor]:
        """Scalar tensors: the hyperparameters that a graph compares by itself."""
        found = self._hyperparameters
        return [] if found is None else found.read()

    def look_at_settings(self) -> Look:
        """Look at this rank's hyperparameters, because a graph found a difference.

        The graph found it in the step after the last one that ``passed`` counted.
        """
        training = self._training()
        self._is_due(training)
        inputs = [np.asarray(each) for each in self.inputs()]
        return self._look(training, inputs, due=False)

    def passed(self, steps: int) -> Look | None:
        """Count steps that a graph has run; look at this rank's state if one was due.

        The look sees the state after the last of these steps.
        """
        training = self._training()
        due = [self._is_due(training) for _ in range(steps)]
        if True not in due:
            return None
        inputs = [np.asarray(each) for each in self.inputs()]
        return self._look(training, inputs, due=True)

    @staticmethod
    def _is_due(training: _Training) -> bool:
        """Count a step; return whether weights are compared in it."""
        training.steps += 1
        return training.steps in _FIRST_STEPS or training.steps % training.every == 0

    def _look(self, training: _Training, inputs: Sequence[Array], *, due: bool) -> Look:
        training.weights = self._weights
        texts: dict[str, str] = {}
        if self._hyperparameters is not None:
            texts = self._hyperparameters.texts(inputs[: self._scalars])
        parts: dict[str, Array] = {}
        if self._compares_weights and due:
            values = inputs[self._scalars :]
            found = self._weights.next_chunks(training.position)
            training.position = found.following
            for chunk in found.chunks:
                part = self._weights.part(chunk, values)
                if part is not None:
                    parts[self._weights.labels[chunk.place]] = part
        return Look(self._session, training, texts, parts)

    def _training(self) -> _Training:
        """The state for this watch; its owner may become known only after the trace."""
        known = self._owner()
        if known is None:
            return self._divergence_check.without_owner(self._what)
        return self._divergence_check.training(*known)


class Look:
    """The data that one exchange compares; see ``collectives.Check``."""

    def __init__(
        self,
        session: Session,
        training: _Training,
        texts: Mapping[str, str],
        parts: Mapping[str, Array],
    ) -> None:
        self._session = session
        self._training = training
        self._parts = parts
        sums = {label: f"{rank_divergence.checksum(a):x}" for label, a in parts.items()}
        self._texts = {**texts, **sums}
        self.note = _digest(texts) + _digest(sums)

    def compared(self, notes: Sequence[bytes]) -> None:
        """Compare the ranks' notes. Raises CollectiveError on all ranks on divergence.

        A rank whose graph is older than its optimizer knows no hyperparameters; then
        only the other ranks are compared.
        """
        kinds = [
            {note[start : start + _DIGEST_BYTES] for note in notes} - {_NOTHING}
            for start in (0, _DIGEST_BYTES)
        ]
        if any(len(found) > 1 for found in kinds):
            self._explain()
        self._training.equal |= dict.fromkeys(self._texts, self._training.steps)

    def _explain(self) -> None:
        name, steps = self._training.name, self._training.steps
        signature = Signature(f"what {name} trains")
        group = self._session.group
        sent = allgather_bytes(group, json.dumps(self._texts).encode(), signature)
        texts = [json.loads(data) for data in sent]
        label = rank_divergence.differing(texts)
        if label is None:
            return
        when = f"in step {steps} of {name}"
        last = rank_divergence.equal_text(self._training.equal.get(label, 0))
        if label not in self._parts:
            values = {rank: found[label] for rank, found in enumerate(texts)}
            self._session.refuse(
                rank_divergence.hyperparameter_text(label, values, when, last)
            )
        part = self._parts[label]
        distance, rank = self._farthest(part, Signature(f"what {label} is"))
        if distance <= rank_divergence.rounding_of(part.dtype.itemsize):
            self._training.every = _EVERY_AFTER_ROUNDING
            self._session.warn(rank_divergence.rounding_text(label, distance))
            return
        ranks = f"rank 0 and rank {rank}"
        self._session.refuse(
            rank_divergence.weights_text(label, ranks, distance, when, last)
        )

    def _farthest(self, part: Array, signature: Signature) -> tuple[float, int]:
        """The largest distance of a rank's array from the chief's, and that rank."""
        sent = allgather_bytes(self._session.group, part.tobytes(), signature)
        arrays = [np.frombuffer(data, part.dtype) for data in sent]
        distances = [rank_divergence.distance(arrays[0], array) for array in arrays]
        rank = int(np.argmax(distances))
        return distances[rank], rank


def _digest(values: Mapping[str, str]) -> bytes:
    if not values:
        return _NOTHING
    text = json.dumps(list(values.items())).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()

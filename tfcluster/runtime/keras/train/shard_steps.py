"""Compute a training step shard by shard, with the same bits on any number of ranks.

Every batch is divided into a fixed number of shards (``runtime.shards``), and each rank
has some of them. It runs the model's step once for each of its shards, so each gradient
is computed from the same rows in tensors of the same shapes on any rank. What reaches
the optimizer is kept. In the end the gradients of all shards are added up in a fixed
order, and the optimizer applies their mean once.

So the step of a shard must not depend on the other shards, nor on the new weights: what
would depend on them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.shard_tree import shard_bounds
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.batches.batch_slicing import (
    Part,
    has_rows,
    take_part,
    twice,
)
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import TRIAL_RANK, Session, Share
from tfcluster.runtime.keras.state.shard_state import ShardState, graph_now
from tfcluster.runtime.keras.tf_variables import is_ours, raw
from tfcluster.runtime.keras.train.shard_exchange import ShardGradients
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.types import Layer, Model, Optimizer, Variable
from tfcluster.runtime.tensor_types import (
    Array,
    Gradient,
    Graph,
    IndexedSlices,
    Nest,
    Tensor,
    Weight,
)
from tfcluster.runtime.tensors import is_sparse

_WITHOUT = "Run the job without runtime.shards"


@dataclass(frozen=True, slots=True)
class ShardPart(Part):
    """A shard's part of a batch."""

    shard: int


@dataclass(frozen=True, slots=True)
class Applied:
    """What the steps of a rank's shards have given to an optimizer."""

    optimizer: Optimizer
    variables: list[Variable]
    apply: Callable[[list[Gradient]], object]
    """Calls the optimizer with the gradients that it is to apply."""
    gradients: list[ShardGradients]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an optimizer by the step of one shard."""

    optimizer: Optimizer
    gradients: list[Gradient]
    variables: list[Variable]
    apply: Callable[[list[Gradient]], object]


@dataclass(slots=True)
class _Step:
    """The step that is being traced or that runs eagerly."""

    graph: Graph | None
    kept: _Call | None = None
    """The call by the shard being computed."""
    calls: list[_Call | None] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    operations: int = 0
    """How many operations the graph had when the shard being computed began."""
    after_call: int = 0
    """How many it had when that shard called the optimizer."""


class ShardSteps:
    """Keeps what the steps of a rank's shards compute, until all have ended."""

    def __init__(
        self, session: Session, state: ShardState, tape_gradients: TapeGradients
    ) -> None:
        self._session = session
        self._state = state
        self._tape_gradients = tape_gradients
        self._step: _Step | None = None

    def begin(self, model: Model, data: Nest, *, plain: bool) -> list[ShardPart]:
        """Begin a step of ``model``; returns this rank's shards of ``data``, in order.

        ``plain``: the step is Keras's own. Raises CollectiveError if the step cannot be
        computed shard by shard, as far as that is known before.
        """
        session = self._session
        assert session.shards is not None
        require_one_thread(session)
        self._check_model(model, plain=plain)
        self._step = _Step(graph_now())
        self._state.begin(model.non_trainable_variables)
        numbers = range(*shard_bounds(session.shards, session.rank, session.size))
        parts = [(take_part(data, each, session.shards), each) for each in numbers]
        return [ShardPart(part.data, part.share, shard) for part, shard in parts]

    def begin_shard(self) -> None:
        """Called before the step of each shard."""
        step = self._step
        assert step is not None
        step.operations = _count(step.graph)

    def end_shard(self, share: Share) -> None:
        """Called after the step of each shard, with the shard's share of the batch.

        Raises CollectiveError if the step has used weights that are not updated yet, or
        has set variables in a way that ``ShardState`` cannot undo.
        """
        step = self._step
        assert step is not None
        if step.graph is not None:
            self._check_operations(step, step.graph)
        step.calls.append(step.kept)
        step.shares.append(share)
        step.kept = None
        self._state.end_of_shard()

    def keep(
        self,
        optimizer: Optimizer,
        gradients: list[Gradient],
        variables: list[Variable],
        apply: Callable[[list[Gradient]], object],
    ) -> None:
        """Keep the gradients that the step of a shard gives to ``optimizer``.

        Raises CollectiveError if the step calls an optimizer twice, in a conditional,
        or with changed gradients.
        """
        step, name = self._step, self._session.optimizer_names.of(optimizer)
        if step is None:
            return
        if step.kept is not None:
            self._session.refuse(
                "a training step applies gradients more than once, as that of a GAN "
                "does. With runtime.shards, gradients are applied after the step has "
                f"run for all shards, so it must do so once. {_WITHOUT}"
            )
        if step.graph is not graph_now():
            self._session.refuse(
                f"a training step applies gradients for {name} within a conditional, a "
                "loop or a tf.function of its own. With runtime.shards, the step "
                f"itself must do so. {_WITHOUT}"
            )
        changed = self._tape_gradients.first_changed(gradients, variables)
        if changed is not None:
            self._session.refuse(
                f"the program changes the gradient of {changed} before {name} applies "
                "it. With runtime.shards, the step sees the gradient of one shard, not "
                "that of the batch. Have the optimizer do it (clipnorm, "
                "global_clipnorm, clipvalue), or run the job without runtime.shards"
            )
        step.kept = _Call(optimizer, gradients, variables, apply)
        step.after_call = _count(step.graph)

    def finish(self) -> Applied | None:
        """End the step; returns what its shards gave to the optimizer, if anything.

        Raises CollectiveError if not all shards used the same optimizer and variables.
        """
        step = self._step
        assert step is not None
        self._step = None
        calls = [call for call in step.calls if call is not None]
        kinds = {(id(c.optimizer), *map(id, c.variables)) for c in calls}
        if len(kinds) > 1 or len(calls) not in (0, len(step.calls)):
            self._session.refuse(
                "a training step applies other gradients for one shard than for "
                f"another. {_WITHOUT}"
            )
        if not calls:
            return None
        _, values = self._state.averages()
        computed = [
            ShardGradients(share.rows, call.gradients, state)
            for share, call, state in zip(step.shares, calls, values, strict=True)
        ]
        first = calls[0]
        return Applied(first.optimizer, first.variables, first.apply, computed)

    def begin_trial(self, part: ShardPart) -> ShardPart:
        """A part with each row of a rank's first shard twice, which does not count.

        Its gradient shows whether the loss is a mean over the rows.
        """
        share = part.share
        rows = share.rows
        repeated = replace(
            share,
            rows=0.0 * rows,
            counts=tf.zeros_like(share.counts) if tf.is_tensor(share.counts) else False,
            trial=True,
            uncounted=2.0 * rows,
        )
        data = tf.nest.map_structure(
            lambda leaf: twice(leaf) if has_rows(leaf) else leaf, part.data
        )
        return ShardPart(data, repeated, TRIAL_RANK)

    def end_trial(self) -> None:
        """Compare the gradient of the trial with that of this rank's first shard."""
        step, trials = self._step, self._session.trials
        assert step is not None
        call, first = step.kept, step.calls[0]
        step.kept = None
        self._state.end_of_shard(counts=False)
        if call is None or first is None or trials is None:
            return
        name = self._session.optimizer_names.of(call.optimizer)
        pairs = [
            (_judgeable(repeated), _judgeable(once))
            for repeated, once in zip(call.gradients, first.gradients, strict=True)
            if repeated is not None and once is not None
        ]
        share = step.shares[0]
        counts = tf.cast(share.counts, tf.bool) & ~tf.cast(share.undivided, tf.bool)

        def judge(counts: np.bool_, *arrays: Array) -> np.bool_:
            given = arrays if counts else [np.zeros_like(array) for array in arrays]
            return np.bool_(trials.judge_repeated(name, given[0::2], given[1::2]))

        exchange_in_order(
            judge, [counts, *(tensor for pair in pairs for tensor in pair)], tf.bool
        )

    def share(self, parts: Sequence[Part]) -> Share:
        """The share of all shards of this rank together."""
        first = parts[0].share
        rows: Weight = first.rows
        counts = first.counts
        for part in parts[1:]:
            rows = rows + part.share.rows
            counts = tf.logical_or(counts, part.share.counts)
        return replace(first, rows=rows, counts=counts)

    # --- what cannot be computed shard by shard ---------------------------------------

    def _check_model(self, model: Model, *, plain: bool) -> None:
        for layer in internals.layers_of(model):
            self._check_layer(layer)
        if not plain and tf.executing_eagerly():
            raise CollectiveError(
                "with runtime.shards, a train_step of the program, or an optimizer of "
                "its own, cannot run eagerly: what it does after it has applied the "
                "gradients cannot be checked. Remove run_eagerly=True"
            )

    def _check_layer(self, layer: Layer) -> None:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise CollectiveError(
                f"the layer {layer.name} is stateful: it keeps a state for each row of "
                f"the batch, which cannot be divided into shards. {_WITHOUT}"
            )

    def _check_operations(self, step: _Step, graph: Graph) -> None:
        """Refuse a step that needs the new weights, or sets variables unnoticed."""
        outer = {id(inner): handle for handle, inner in graph.captures}
        trained: set[int] = set()
        if step.kept is not None:
            trained = {id(raw(each).handle) for each in step.kept.variables}
        operations = graph.get_operations()
        for place in range(step.operations, len(operations)):
            operation = operations[place]
            for tensor in operation.inputs:
                handle = outer.get(id(tensor))
                if tensor.dtype != tf.resource or handle is None:
                    continue
                if place >= step.after_call and id(handle) in trained:
                    self._session.refuse(
                        "a training step uses weights after it has applied their "
                        "gradients. With runtime.shards, gradients are applied after "
                        f"the step has run for all shards. {_WITHOUT}"
                    )
                if (
                    tf_internals.may_write(operation, tensor)
                    and not is_ours(handle)
                    and not self._state.has_seen(handle)
                ):
                    self._session.refuse(
                        "a training step sets a tf.Variable of the program "
                        f"({operation.name}). With runtime.shards, every shard would "
                        f"set it once more. {_WITHOUT}"
                    )


def _judgeable(gradient: Tensor | IndexedSlices) -> Tensor:
    """A dense tensor that grows like the gradient.

    Repeated rows also repeat the slices, so their sum stands for them.
    """
    if is_sparse(gradient):
        return tf.reduce_sum(gradient.values, axis=0, keepdims=True)
    return gradient


def _count(graph: Graph | None) -> int:
    return 0 if graph is None else len(graph.get_operations())


def compute_alike(session: Session) -> None:
    """Make TensorFlow compute the same bits in every process that trains in shards.

    It uses one thread for each operation, and only deterministic operations. Raises
    CollectiveError if there are more ranks than shards, or TensorFlow is in use.
    """
    assert session.shards is not None
    if session.size > session.shards:
        raise CollectiveError(
            f"runtime.shards is {session.shards}, and there are {session.size} ranks: "
            "a rank needs at least one shard. Use fewer ranks, or more shards"
        )
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    except RuntimeError as error:
        raise CollectiveError(
            "runtime.shards needs one thread for each operation, but the program has "
            "used TensorFlow before it imports Keras. Import Keras first"
        ) from error
    tf.config.experimental.enable_op_determinism()


def require_one_thread(session: Session) -> None:
    """Raise CollectiveError unless TensorFlow computes each operation on one thread."""
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if threads != 1:
        session.refuse(
            "runtime.shards needs one thread for each operation, because TensorFlow's "
            f"results depend on their number; the program has set {threads}. Remove "
            "tf.config.threading.set_intra_op_parallelism_threads. Several operations "
            "still run at a time"
        )

"""Computes a training step shard by shard, with the same bits on any number of ranks.

Every batch is divided into a fixed number of shards (``runtime.shards``), and each rank
has some of them. It runs the model's step once for each of its shards, in lockstep: so
each gradient is computed from the same rows in tensors of the same shapes on any rank.
Where a tape returns gradients of weights, or where the optimizer gets them, the shards
wait for each other, and the gradients of all shards are added up in a fixed order. From
then on, all shards have the gradient of the whole batch, and the step uses it once: an
optimizer applies it, or a variable is set.

A step is refused if this would depend on the rows of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.shard_tree import shard_bounds
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.batches.batch_slicing import (
    Part,
    common_rows,
    has_dense_rows,
    has_rows,
    take_part,
    twice,
)
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import OF_A_CHECK, TRIAL_RANK, Session, Share
from tfcluster.runtime.keras.state.shard_state import ShardState, graph_now
from tfcluster.runtime.keras.tf_variables import is_ours, raw
from tfcluster.runtime.keras.train import matmul_gradient
from tfcluster.runtime.keras.train.gradient_allreduce import Target, Watch
from tfcluster.runtime.keras.train.lockstep import Lockstep, Unlike
from tfcluster.runtime.keras.train.shard_dependence import ShardDependence
from tfcluster.runtime.keras.train.shard_exchange import ShardGradients, exchange_shards
from tfcluster.runtime.keras.types import Layer, Model, Variable
from tfcluster.runtime.tensor_types import (
    Array,
    Gradient,
    Graph,
    IndexedSlices,
    Nest,
    Tensor,
    Weight,
)
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import is_sparse

T = TypeVar("T")
R = TypeVar("R")

_AS_WRITTEN = "disable_meta_optimizer"
"""TensorFlow's option that disables rewriting graphs before they run."""

_WITHOUT = "Run the job without runtime.shards"


@dataclass(frozen=True, slots=True)
class ShardPart(Part):
    """A shard's part of a batch."""

    shard: int


@dataclass(frozen=True, slots=True)
class Given:
    """The values that the step of a shard has computed."""

    gradients: list[Gradient]
    variables: list[Variable]
    where: str = ""
    """The line of the program that applies them."""


@dataclass(slots=True)
class _Step:
    """The step that is being traced or that runs eagerly."""

    graph: Graph | None
    shares: list[Share]
    """The shares of the shards that count."""
    lockstep: Lockstep
    dependence: ShardDependence | None
    """None if the step runs eagerly."""
    looked: int
    """The number of operations of the graph that have been checked."""
    of_checks: set[str] = field(default_factory=set)
    """The names of operations that belong to our own checks."""
    is_alone: bool = False
    """Whether one shard acts for all of them."""
    changed: list[Variable | TfVariable] = field(default_factory=list)
    """The variables that the step has set."""


class ShardSteps:
    """Runs the steps of a rank's shards, and lets them wait for each other."""

    def __init__(
        self,
        session: Session,
        state: ShardState,
        before_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_waiting()`` is called in the thread of a shard that waits."""
        self._session = session
        self._state = state
        self._before_waiting = before_waiting
        self._step: _Step | None = None

    def install(self) -> None:
        """Install the hook on conditionals in TensorFlow, once per process."""
        tf_patches.TABLE.install({tf_patches.CONDITIONAL: self._conditional})

    # --- the whole step ---------------------------------------------------------------

    def parts(self, data: Nest) -> list[ShardPart]:
        """This rank's shards of ``data``, in order."""
        session = self._session
        assert session.shards is not None
        numbers = range(*shard_bounds(session.shards, session.rank, session.size))
        parts = [(take_part(data, each, session.shards), each) for each in numbers]
        found = [ShardPart(part.data, part.share, shard) for part, shard in parts]
        if tf.executing_eagerly():
            return found
        hides = not _has_equal_shards(data, session.shards)
        return [_dependent(part, hides_rows=hides) for part in found]

    def check(self, model: Model, *, plain: bool) -> None:
        """Raise CollectiveError if a step of ``model`` cannot be divided.

        ``plain`` is true if the step is Keras's own.
        """
        require_alike(self._session)
        for layer in internals.layers_of(model):
            self._check_layer(layer)
        if not plain and tf.executing_eagerly():
            raise CollectiveError(
                "with runtime.shards, the program's own train_step or optimizer "
                "cannot run eagerly: what it does besides computing gradients "
                "cannot be checked. Remove run_eagerly=True"
            )

    def run(
        self,
        parts: Sequence[ShardPart],
        trial: ShardPart | None,
        state: Sequence[Variable],
        step: Callable[[ShardPart], T],
        merged: Callable[[list[T]], R],
    ) -> R:
        """Run ``step`` for each part in lockstep; return ``merged`` of the results.

        Called within ``Session.stepping`` of the share of all parts. ``trial`` is an
        additional last part, which does not count. ``state`` has variables that layers
        may set. Raises CollectiveError if the step does something that cannot be done
        shard by shard, and what ``step`` and ``exchange_shards`` raise.
        """
        graph = graph_now()
        chosen = [*parts] if trial is None else [*parts, trial]
        dependence = None
        if graph is not None:
            dependence = ShardDependence(graph)
            dependence.begin_with(leaf for part in chosen for leaf in _tensors_of(part))
        lockstep = Lockstep(self._inside(graph), self._enter, self._leave)
        self._state.begin(state, len(parts), trial=trial is not None)
        self._step = _Step(
            graph,
            [part.share for part in parts],
            lockstep,
            dependence,
            0 if graph is None else len(graph.get_operations()),
        )
        names = [f"shard {part.shard}" for part in parts]
        if trial is not None:
            names.append("shard of a trial")
        step = tf_internals.as_called_here(step)
        try:
            found = lockstep.run(names, [partial(step, part) for part in chosen])
            self._combine_state()
            return merged(found)
        except Unlike:
            self._session.refuse(
                "a training step computes or applies different gradients for "
                f"different shards of a batch. {_WITHOUT}"
            )
        finally:
            self._state.finish()
            self._step = None

    def share(self, parts: Sequence[Part]) -> Share:
        """The share of all shards of this rank together."""
        first = parts[0].share
        rows: Weight = first.rows
        counts = first.counts
        for part in parts[1:]:
            rows = rows + part.share.rows
            counts = tf.logical_or(counts, part.share.counts)
        return replace(first, rows=rows, counts=counts)

    def trial(self, part: ShardPart) -> ShardPart:
        """A part with each row of a rank's first shard twice, which does not count.

        Its gradients show whether the loss is a mean over the rows.
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

    # --- called in the step of a shard ------------------------------------------------

    def together(
        self, kind: tuple[object, ...], given: T, act: Callable[[list[T]], Any]
    ) -> Any:
        """``act`` of the values that all shards give at the same place of their steps.

        The trial's value comes last, if there is one. ``kind`` says what the shards do.
        Raises CollectiveError within a conditional, a loop or another function.
        """
        step = self._known()
        self.require_graph(str(kind[0]))
        self._before_waiting()
        return step.lockstep.together(kind, given, act)

    def require_graph(self, what: str) -> None:
        """Raise CollectiveError unless the step itself does ``what``."""
        if self._known().graph is not graph_now():
            self._session.refuse(
                f"{user_line()}: a training step {what} within a conditional, a loop "
                "or a function of its own that depends on the rows of the batch. With "
                f"runtime.shards, the step itself must do so. {_WITHOUT}"
            )

    @property
    def is_alone(self) -> bool:
        """Whether one shard acts for all shards, so that its actions happen once."""
        return self._step is not None and self._step.is_alone

    def set_once(
        self, variable: Variable | TfVariable, value: Any, assign: Callable[[Any], T]
    ) -> T:
        """Call ``assign(value)`` once for all shards: the program sets ``variable``.

        Raises CollectiveError if the value depends on the rows of one shard.
        """
        step = self._known()
        if step.is_alone:
            step.changed.append(variable)
            return assign(value)

        where = user_line()

        def act(given: list[Any]) -> T:
            if self.depends([_tensor(given[0])]):
                self._state.refuse(variable, f"{where}: the program's own step")
            result = assign(given[0])
            self._state.changed_by_program(variable)
            return result

        found: T = self.together(("sets a variable", id(variable)), value, act)
        return found

    def depends(self, tensors: Sequence[Tensor]) -> bool:
        """Whether any of these tensors may depend on the rows of one shard."""
        step = self._known()
        if step.dependence is None:
            return True
        return any(map(step.dependence.is_dependent, tensors))

    def _conditional(self, original: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a ``tf.cond`` once for all shards if it does not depend on their rows.

        Then its branches may apply gradients and set variables.
        """
        session = self._session
        if (
            session.current_shard is None
            or session.plain_step
            or session.within("update_state")
            or internals.call_context() is not None
            or (graph := graph_now()) is None
            or self._step is None
            or self._step.graph is not graph
        ):
            return original(*args, **kwargs)
        if session.within(OF_A_CHECK):
            return self._checked(partial(original, *args, **kwargs))
        self._before_waiting()
        shared: list[T] | None = self._step.lockstep.alone(
            ("decides",), lambda: self._tried(partial(original, *args, **kwargs))
        )
        return original(*args, **kwargs) if shared is None else shared[0]

    def _checked(self, run: Callable[[], T]) -> T:
        """The result of a conditional of one of our checks, in one shard alone."""
        step = self._known()
        assert step.graph is not None
        assert step.dependence is not None
        step.dependence.follow()
        before = len(step.graph.get_operations())
        result = run()
        step.dependence.skip()
        added = step.graph.get_operations()[before:]
        step.of_checks.update(operation.name for operation in added)
        return result

    def _tried(self, run: Callable[[], T]) -> list[T] | None:
        """The result of the first shard's conditional, if it is right for all."""
        step = self._known()
        assert step.graph is not None
        assert step.dependence is not None
        step.dependence.follow()
        before = len(step.graph.get_operations())
        step.is_alone, step.changed = True, []
        self._state.touched = False
        try:
            result = run()
        finally:
            step.is_alone = False
        operations = step.graph.get_operations()[before:]
        inputs = [tensor for each in operations for tensor in each.inputs]
        common = not self._state.touched and not self.depends(inputs)
        if step.changed and not common:
            self._session.refuse(
                f"{user_line()}: a training step applies gradients or sets variables "
                "within a conditional that depends on the rows of the batch. With "
                "runtime.shards, the step knows the rows of one shard only. "
                f"{_WITHOUT}"
            )
        for variable in step.changed:
            self._state.changed_by_program(variable)
        return [result] if common else None

    # --- called by the main thread while all shards wait ------------------------------

    def combined(
        self,
        target: Target,
        given: Sequence[Given],
        watch: Watch | None,
    ) -> list[Gradient]:
        """Average over all ranks' shards, and combine layers' variables as well.

        Raises what ``exchange_shards`` and ``Trials.judge_repeated`` raise.
        """
        step = self._known()
        counted = given[: len(step.shares)]
        if len(given) > len(counted):
            self._judge(target, given[-1], given[0])
        averaged, values = self._state.averages()
        computed = [
            ShardGradients(share.rows, each.gradients, state)
            for share, each, state in zip(step.shares, counted, values, strict=True)
        ]
        means, state = exchange_shards(
            self._session, target, computed, counted[0].variables, averaged, watch
        )
        self._set_state(state)
        return means

    def _combine_state(self) -> None:
        """Combine the variables that layers have set since the last gradient."""
        averaged, _ = self._state.averages()
        if averaged:
            step = self._known()
            empty = [Given([], []) for _ in step.shares]
            self.combined(Target.of("variables of layers"), empty, None)
        else:
            self._set_state([])

    def _set_state(self, means: Sequence[Tensor]) -> None:
        step = self._known()
        changed = self._state.combine(means)
        if step.dependence is not None:
            step.dependence.forget(map(raw, changed))

    def _judge(self, target: Target, repeated: Given, once: Given) -> None:
        """Compare the trial's gradient with the gradient of this rank's first shard."""
        trials = self._session.trials
        if trials is None:
            return
        pairs = [
            (_judgeable(one), _judgeable(other))
            for one, other in zip(repeated.gradients, once.gradients, strict=True)
            if one is not None and other is not None
        ]
        share = self._known().shares[0]
        counts = tf.cast(share.counts, tf.bool) & ~tf.cast(share.undivided, tf.bool)

        def judge(counts: np.bool_, *arrays: Array) -> np.bool_:
            given = arrays if counts else [np.zeros_like(array) for array in arrays]
            name = target.name()
            return np.bool_(trials.judge_repeated(name, given[0::2], given[1::2]))

        exchange_in_order(
            judge, [counts, *(tensor for pair in pairs for tensor in pair)], tf.bool
        )

    # ----------------------------------------------------------------------------------

    def _known(self) -> _Step:
        assert self._step is not None
        return self._step

    def _inside(
        self, graph: Graph | None
    ) -> Callable[[], AbstractContextManager[object]]:
        """Return a context in which a shard's thread takes over this thread's state."""
        session = self._session
        enter_graph = tf_internals.graph_for_threads(graph)
        keras_state, marks = internals.thread_state(), session.marks()

        @contextmanager
        def inside() -> Iterator[None]:
            internals.set_thread_state(keras_state)
            session.set_marks(marks)
            with enter_graph():
                yield

        return inside

    def _enter(self, shard: int) -> None:
        step = self._known()
        self._state.enter(shard)
        if step.graph is not None and step.dependence is not None:
            step.dependence.skip()
            step.looked = len(step.graph.get_operations())

    def _leave(self, shard: int) -> None:
        step = self._known()
        if step.graph is not None and step.dependence is not None:
            step.dependence.follow()
            self._check_operations(step, step.graph)
        self._state.leave(shard)

    def _check_layer(self, layer: Layer) -> None:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise CollectiveError(
                f"the layer {layer.name} is stateful: it keeps a state for each row of "
                f"the batch, which cannot be divided into shards. {_WITHOUT}"
            )

    def _check_operations(self, step: _Step, graph: Graph) -> None:
        """Refuse a step that sets variables unnoticed by the runtime."""
        outer = {id(inner): handle for handle, inner in graph.captures}
        operations = graph.get_operations()
        for operation in operations[step.looked :]:
            if operation.name in step.of_checks:
                continue
            for tensor in operation.inputs:
                handle = outer.get(id(tensor))
                if tensor.dtype != tf.resource or handle is None:
                    continue
                if (
                    tf_internals.may_write(operation, tensor)
                    and not is_ours(handle)
                    and not self._state.has_seen(handle)
                    and not _is_new(handle)
                ):
                    self._session.refuse(
                        f"{user_line(operation)}: a training step sets a tf.Variable "
                        f"of the program ({operation.name}). With runtime.shards, "
                        f"every shard would set it once more. {_WITHOUT}"
                    )


def _is_new(handle: Tensor) -> bool:
    """Whether a variable has no value yet: the step sets it where it is created."""
    with tf.init_scope():
        return not tf.raw_ops.VarIsInitializedOp(resource=handle)


def _has_equal_shards(data: Nest, shards: int) -> bool:
    """Whether all shards are known to have the same number of rows, at least one."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
    if not leaves:
        return True
    batch, common = common_rows(leaves)
    return isinstance(batch, int) and common is True and batch % shards == 0 < batch


def _dependent(part: ShardPart, *, hides_rows: bool) -> ShardPart:
    """The same part of a batch, as tensors that were created for this part alone.

    With ``hides_rows``, the program does not know their number of rows, because it
    differs between shards.
    """

    def own(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        if not has_dense_rows(leaf):
            return tf.nest.map_structure(tf.identity, leaf, expand_composites=True)
        leaf = tf.convert_to_tensor(leaf)
        if hides_rows and leaf.shape.rank:
            return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])
        return tf.identity(leaf)

    first = tf.identity(tf.cast(part.share.first, tf.int64))
    share = replace(part.share, first=first)
    return ShardPart(tf.nest.map_structure(own, part.data), share, part.shard)


def _tensor(value: Any) -> Any:
    """A tensor of the graph; a number or an array becomes a constant."""
    return tf.convert_to_tensor(
        raw(value) if isinstance(value, keras.Variable) else value
    )


def _tensors_of(part: ShardPart) -> Iterator[Any]:
    for leaf in tf.nest.flatten(part.data, expand_composites=True):
        if tf.is_tensor(leaf):
            yield leaf
    if tf.is_tensor(part.share.first):
        yield part.share.first


def _judgeable(gradient: Tensor | IndexedSlices) -> Tensor:
    """A dense tensor that grows like the gradient.

    Repeated rows also repeat the slices, so the sum of the slices represents them.
    """
    if is_sparse(gradient):
        return tf.reduce_sum(gradient.values, axis=0, keepdims=True)
    return gradient


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
    # How it rewrites a shard's operations depends on the other shards in the graph.
    tf.config.optimizer.set_experimental_options({_AS_WRITTEN: True})
    # Not a conditional, which would depend on the rows of a shard.
    matmul_gradient.MatmulGradient(unknown_are_few=True).install()


def require_alike(session: Session) -> None:
    """Raise CollectiveError if the program has undone ``compute_alike``."""
    if not tf.config.optimizer.get_experimental_options().get(_AS_WRITTEN):
        session.refuse(
            "runtime.shards needs graphs that run as they are written, but the program "
            "has switched TensorFlow's graph optimizer on. Remove "
            f"{_AS_WRITTEN} from tf.config.optimizer.set_experimental_options"
        )
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if threads != 1:
        session.refuse(
            "runtime.shards needs one thread for each operation, because TensorFlow's "
            f"results depend on their number; the program has set {threads}. Remove "
            "tf.config.threading.set_intra_op_parallelism_threads. Several operations "
            "still run at a time"
        )

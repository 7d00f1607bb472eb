"""Records the steps of TensorFlow 1 optimizers, for ``tfcluster verify``.

A step is an update that an optimizer applies, in a graph or eagerly. In a graph, ops
that read the variables run after the update in the same ``session.run``. With
synchronised replicas, the chief's update runs in its own thread, and no worker gets a
token before the update has been recorded. Changes nothing that the program computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.partition.script_lines import user_line
from tfcluster.runtime.recording_files import RecordingFiles
from tfcluster.runtime.tensor_types import (
    Array,
    Gradient,
    Graph,
    Operation,
    Tensor,
    Variable,
)
from tfcluster.runtime.tf1 import patches
from tfcluster.runtime.tf1.script_hooks import STOP_GRACE_S
from tfcluster.runtime.tf1_types import V1Optimizer, V1Session

tf1 = tf.compat.v1

_TAKEN = "AccumulatorTakeGradient"
"""How the names of op types end that take a mean of several workers' gradients."""
_MOST_NAMES = 3
STOP_GRACE_PLACE = 10
"""The position of ``stop_grace_period_secs`` in ``MonitoredTrainingSession``."""


class GraphStepRecorder:
    """The hooks on optimizers and sessions of TensorFlow 1."""

    def __init__(self, files: RecordingFiles, context: Context, seed: int) -> None:
        self._files = files
        self._device = (
            f"/job:{context.task_type}/task:{context.task_index}/device:CPU:0"
        )
        self._on_cluster = bool(context.cluster.get("ps"))
        self._seed = seed
        self._graphs: weakref.WeakKeyDictionary[Graph, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        """Graphs with an optimizer, and the names of the variables that are read."""
        self._looked_at: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._synchronised = False
        """Whether the script has a SyncReplicasOptimizer."""
        self._inside = threading.local()

    def install(self) -> None:
        """Install the hooks in TensorFlow, once per process.

        Raises CollectiveError if TensorFlow lacks something that they need.
        """
        patches.check()
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.SYNC_APPLY: self._sync_apply,
                patches.SESSION_RUN: self._run,
                patches.INTERACTIVE_RUN: self._run,
                patches.GRAPH_AS_DEFAULT: self._as_default,
                patches.MONITORED_SESSION: self._monitored,
                **dict.fromkeys(patches.NEW_DEFAULT_GRAPHS, self._new_default_graph),
                **dict.fromkeys(patches.CLIPS, self._clip),
            },
            HandlerPlace.RECORD,
            always=True,
        )

    # --- hooks ------------------------------------------------------------------------

    def _apply(
        self,
        original: Callable[..., Operation | None],
        optimizer: V1Optimizer,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        *args: Any,
        **kwargs: Any,
    ) -> Operation | None:
        pairs = list(grads_and_vars)
        applied = original(optimizer, pairs, *args, **kwargs)
        return self._recorded(optimizer, pairs, applied)

    def _sync_apply(
        self, original: Callable[..., Operation], *args: Any, **kwargs: Any
    ) -> Operation:
        self._inside.sync = True
        self._synchronised = True
        try:
            return original(*args, **kwargs)
        finally:
            self._inside.sync = False

    def _monitored(
        self, original: Callable[..., V1Session], *args: Any, **kwargs: Any
    ) -> V1Session:
        if self._synchronised and len(args) <= STOP_GRACE_PLACE:
            # Its thread, which waits for gradients, keeps a session open for 120 s.
            kwargs.setdefault("stop_grace_period_secs", STOP_GRACE_S)
        return original(*args, **kwargs)

    def _run(
        self,
        original: Callable[..., Any],
        session: V1Session,
        fetches: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = original(session, fetches, *args, **kwargs)
        if self._files.writes and session.graph in self._graphs:
            self._note_others(session.graph)
            logs = dict(_numbers(fetches, result))
            if logs:
                self._files.event({"kind": "run", "model": 0, "logs": logs})
        return result

    def _as_default(self, original: Callable[[Graph], Any], graph: Graph) -> Any:
        # A graph does not know tf.random.set_seed, which was called outside of it.
        if type(graph) is tf.Graph and graph.seed is None:
            graph.seed = self._seed
        return original(graph)

    def _new_default_graph(
        self, original: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        original(*args, **kwargs)
        if not tf.executing_eagerly():
            tf1.get_default_graph().seed = self._seed

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Other clips belong to Keras, or to a step of Keras's recorder.
        if not tf.executing_eagerly() and not tf.inside_function():
            self._files.note_once({"kind": "clip", "line": user_line()})
        return original(*args, **kwargs)

    # --- records ----------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _recorded(
        self,
        optimizer: V1Optimizer,
        pairs: Sequence[tuple[Gradient, Variable]],
        applied: Operation | None,
    ) -> Operation | None:
        """Record the step's result now, or return an op that applies and records it."""
        number, _ = self._files.optimizer_number(optimizer)
        trained = [variable for gradient, variable in pairs if gradient is not None]
        trained_names = {_name(variable) for variable in trained}
        slots = [
            one for one in optimizer.variables() if _name(one) not in trained_names
        ]
        names = [["weight", _name(one)] for one in trained]
        names += [["slot", _name(one)] for one in slots]
        rate = tf_internals.learning_rate_of(optimizer)
        if rate is None:
            self._not_compared(f"the learning rate of {type(optimizer).__name__}")
        else:
            names.insert(0, ["learning_rate", "learning_rate"])

        def write(*arrays: Array) -> np.bool_:
            self._files.step(number, names, arrays, ends_all=self._on_cluster)
            return np.bool_(True)

        rates = [] if rate is None else [tf.convert_to_tensor(rate)]
        variables = [*trained, *slots]
        if tf.executing_eagerly():
            write(*(np.asarray(one.numpy()) for one in [*rates, *variables]))
            return applied
        self._note_method([gradient for gradient, _ in pairs])
        if tf.inside_function():
            tf.numpy_function(
                write, [*rates, *map(tf.convert_to_tensor, variables)], []
            )
            return applied
        return self._op(write, rates, variables, cast(Operation, applied))

    def _op(
        self,
        write: Callable[..., np.bool_],
        rates: Sequence[Tensor],
        variables: Sequence[Variable],
        applied: Operation,
    ) -> Operation:
        """An op that runs ``applied`` and records the variables after it."""
        graph = tf1.get_default_graph()
        self._graphs.setdefault(graph, set()).update(map(_name, variables))
        # Record in this process, wherever the variables are.
        cluster = self._on_cluster and any("/job:" in v.device for v in variables)
        with (
            tf1.name_scope("tfcluster_recorder"),
            tf1.control_dependencies([applied]),
        ):
            values = [*rates, *map(_read, variables)]
            with tf1.device(self._device if cluster else None):
                written = tf.numpy_function(write, values, tf.bool)
            recorded = tf.group(written)
        training = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
        training[:] = [recorded if one is applied else one for one in training]
        return cast(Operation, recorded)

    def _note_method(self, gradients: Sequence[Gradient]) -> None:
        """Record how the updates of workers combine."""
        method = "independent"
        if getattr(self._inside, "sync", False):
            method = "sync_replicas"
        elif any(_is_taken(one) for one in gradients if one is not None):
            method = "mean"
        self._files.note_once({"kind": "tf1", "method": method})

    def _note_others(self, graph: Graph) -> None:
        """Record variables that change in other ways: they are not read in order."""
        if graph in self._looked_at:
            return
        self._looked_at.add(graph)
        others = [
            _name(one)
            for one in graph.get_collection(tf1.GraphKeys.GLOBAL_VARIABLES)
            if _name(one) not in self._graphs[graph] and one.dtype.is_floating
        ]
        if others:
            more = ", ..." if len(others) > _MOST_NAMES else ""
            shown = ", ".join(others[:_MOST_NAMES])
            self._not_compared(f"variables that no optimizer sets ({shown}{more})")

    def _not_compared(self, what: str) -> None:
        self._files.note_once({"kind": "not_compared", "what": what})


def _read(variable: Variable) -> Tensor:
    # Read on its own device: otherwise the value may be sent before the update.
    with tf1.device(variable.device):
        return tf1.identity(variable.read_value())


def _name(variable: Variable) -> str:
    return str(variable.name).partition(":")[0]


def _is_taken(gradient: Gradient) -> bool:
    """Whether a gradient is the mean of several workers' gradients."""
    values = cast(Tensor, getattr(gradient, "values", gradient))
    return str(values.op.type).endswith(_TAKEN)


def _numbers(fetches: Any, result: Any) -> Iterator[tuple[str, float]]:
    """The floating-point scalars among fetched values, by the names of their tensors.

    For a managed session, only the program's own fetches count.
    """
    if isinstance(fetches, Mapping):
        if "caller" in fetches:
            yield from _numbers(fetches["caller"], result["caller"])
            return
        for key in fetches:
            yield from _numbers(fetches[key], result[key])
    elif isinstance(fetches, list | tuple):
        for one, value in zip(fetches, result, strict=True):
            yield from _numbers(one, value)
    elif isinstance(result, np.floating):
        yield str(getattr(fetches, "name", fetches)), float(result)

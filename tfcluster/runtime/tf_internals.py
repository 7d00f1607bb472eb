"""All of TensorFlow's non-public parts that the runtime uses.

``NAMES`` says for each name which feature needs it; other modules use only the
functions here. They neither import ``tensorflow.python`` nor use private attributes of
TensorFlow's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from tfcluster.runtime import contract, tf_patches
from tfcluster.runtime.contract import PrivateName, names

if TYPE_CHECKING:
    # This imports numpy, which a server must not do: see ``task.serve``.
    from tfcluster.runtime.tensor_types import (
        Dataset,
        Graph,
        Operation,
        ProtocolBuffer,
        Tensor,
        Variable,
    )
    from tfcluster.runtime.tf1_types import V1Optimizer

_CONTEXT = "tensorflow.python.eager.context.Context"
_DATASET = "tensorflow.data.Dataset"
_FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function"
_MANAGER = "tensorflow.train.CheckpointManager"
_TRAIN_1 = "tensorflow.compat.v1.train"

_DATA = "data tasks"
_LOOPS = "the batches of loops"
_TRANSPORT = "transport: tensorflow"
_SERVERS = "parameter servers"

NAMES_WITHOUT_KERAS = (
    *names("tensorflow.python.eager.context", _TRANSPORT, "context"),
    *names("tensorflow.python.util.tf_stack", "messages", "extract_stack"),
    *names(_DATASET, _DATA, "_variant_tensor"),
    *names(
        "tensorflow.python.checkpoint.functional_saver.MultiDeviceSaver.__init__",
        "checkpoints of divided weights",
        "_registered_savers",
    ),
    *names("tensorflow.python.eager.context", _SERVERS, "function_executor_type"),
    *names(f"{_CONTEXT}.__init__", _TRANSPORT, "_context_handle"),
    *names(
        _CONTEXT,
        _TRANSPORT,
        "abort_collective_ops",
        "config",
        "configure_collective_ops",
        "enable_collective_ops",
        "ensure_initialized",
    ),
    *names(_CONTEXT, _SERVERS, "add_function_def"),
    *names(
        "tensorflow.python.autograph.impl.api", "errors of exchanges", "StagingError"
    ),
    *names("tensorflow.__internal__", "a program's own exchanges", "EagerTensor"),
    *names(_DATASET, _LOOPS, "_inputs"),
)
"""Names that ``exchange``, ``parameter_server`` and ``collective.transports`` need,
with or without the hooks on Keras."""

NAMES = (
    *NAMES_WITHOUT_KERAS,
    PrivateName(
        _DATASET, "_inputs", _DATA, overridden_in="keras.data.data_service_hooks"
    ),
    *(
        PrivateName(f"tensorflow.python.data.ops.{where}", "", _LOOPS)
        for where in (
            "batch_op._BatchDataset",
            "cache_op.CacheDataset",
            "concatenate_op._ConcatenateDataset",
            "dataset_ops._OptionsDataset",
            "filter_op._FilterDataset",
            "ignore_errors_op._IgnoreErrorsDataset",
            "map_op._MapDataset",
            "padded_batch_op._PaddedBatchDataset",
            "prefetch_op._PrefetchDataset",
            "repeat_op._RepeatDataset",
            "shuffle_op._ShuffleDataset",
            "skip_op._SkipDataset",
            "take_op._TakeDataset",
            "take_while_op._TakeWhileDataset",
            "zip_op._ZipDataset",
        )
    ),
    *names(f"{_FUNCTION}.__init__", "tf.function without XLA", "_jit_compile"),
    *names(_FUNCTION, "tf.function without XLA", "_clone"),
    *names(
        "tensorflow.python.ops.control_flow_util",
        "exchanges in graphs",
        "GraphOrParentsInXlaContext",
    ),
    *names(_MANAGER, "CheckpointManager", "_prefix", "_sweep"),
    *names(
        f"{_MANAGER}.__init__",
        "CheckpointManager",
        "_latest_checkpoint",
        "_maybe_delete",
    ),
    *names("tensorflow.python.ops.resource_variable_ops", _SERVERS, "ResourceVariable"),
    *names(
        "tensorflow.python.autograph.pyct.loader.load_source",
        "messages",
        "__autograph_generated_file",
    ),
)

NAMES_OF_TF1 = (
    *names(f"{_TRAIN_1}.Server.__init__", "one server", "_server", "_server_def"),
    *names(
        f"{_TRAIN_1}.SyncReplicasOptimizer.__init__",
        "the exit of workers",
        "_sync_token_queue",
    ),
    *names(
        f"{_TRAIN_1}.SessionManager.__init__",
        "sessions that wait",
        *("_graph", "_recovery_wait_secs"),
    ),
    *names(
        f"{_TRAIN_1}.GradientDescentOptimizer._prepare",
        "tfcluster verify",
        "_learning_rate_tensor",
    ),
    *names(f"{_TRAIN_1}.AdamOptimizer._prepare", "tfcluster verify", "_lr_t"),
)

NAMES_OF_OPTIMIZER_1 = names(
    f"{_TRAIN_1}.Optimizer",
    "DistributedOptimizer",
    "_apply_dense",
    "_apply_sparse",
    "_apply_sparse_duplicate_indices",
    "_create_slots",
    "_finish",
    "_prepare",
    "_resource_apply_dense",
    "_resource_apply_sparse",
    "_resource_apply_sparse_duplicate_indices",
    "_valid_dtypes",
)
"""The private methods that TensorFlow 1's optimizers call on each other."""

BATCHES = ("Batch", "PaddedBatch", "ParallelBatch", "Rebatch")
"""Kinds of datasets whose elements are batches."""

KEEPS_BATCHES = (
    "AssertCardinality",
    "Cache",
    "Concatenate",
    "Filter",
    "IgnoreErrors",
    "Map",
    "Options",
    "ParallelMap",
    "Prefetch",
    "Repeat",
    "Shard",
    "Shuffle",
    "Skip",
    "Take",
    "TakeWhile",
    "Zip",
)
"""Kinds of datasets whose elements are batches if the elements of their inputs are."""


def check() -> None:
    """Raise one CollectiveError that names all that TensorFlow lacks.

    This is for programs without the hooks on Keras, such as programs that use only the
    Horovod-like API. Keras's own check covers these names as well.
    """
    contract.check([*NAMES_WITHOUT_KERAS, tf_patches.FUNCTION_CALL], optional=False)


class TracedFunction(Protocol):
    """A ``tf.function``."""

    _jit_compile: bool | None
    name: str

    def _clone(self, python_function: Callable[..., Any] | None) -> TracedFunction: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class CheckpointManager(Protocol):
    """A ``tf.train.CheckpointManager``."""

    checkpoint: Any
    _latest_checkpoint: str | None
    _maybe_delete: dict[str, float]
    _prefix: str

    def _sweep(self) -> None: ...


class TF1Server(Protocol):
    """A ``tf.compat.v1.train.Server``."""

    _server: object
    _server_def: ProtocolBuffer
    target: str
    """The target of sessions on this server: ``grpc://HOST:PORT``."""


class Queue(Protocol):
    """A ``tf.queue.QueueBase`` in a graph."""

    def close(self) -> Operation: ...


class SessionManager(Protocol):
    """A ``tf.compat.v1.train.SessionManager``."""

    _graph: Graph
    _recovery_wait_secs: float


class SyncReplicasOptimizer(Protocol):
    """A ``tf.compat.v1.train.SyncReplicasOptimizer``."""

    _sync_token_queue: Queue


class EagerContext(Protocol):
    """The eager context of a process."""

    _context_handle: object | None
    config: ProtocolBuffer

    def ensure_initialized(self) -> None: ...

    def abort_collective_ops(self, code: int, message: str) -> None: ...

    def configure_collective_ops(
        self, *, collective_leader: str, device_filters: Sequence[str]
    ) -> None: ...

    def enable_collective_ops(self, server_def: ProtocolBuffer) -> None: ...

    def add_function_def(self, fdef: ProtocolBuffer) -> None: ...


class Frame(Protocol):
    """A line of a program that is being executed."""

    filename: str
    lineno: int


# --- datasets -------------------------------------------------------------------------


def inputs_of(dataset: Dataset) -> Sequence[Dataset]:
    """The datasets from which ``dataset`` reads; none for a source."""
    return dataset._inputs()


def variant_of(dataset: Dataset) -> Tensor:
    """The tensor that represents a dataset in ops: a scalar of dtype ``tf.variant``."""
    return dataset._variant_tensor


def kind_of(dataset: Dataset) -> str:
    """The kind of a dataset, such as ``Batch`` or ``Map``: a part of its class name."""
    return type(dataset).__name__.removeprefix("_").removesuffix("Dataset")


# --- functions and graphs -------------------------------------------------------------


def is_for_xla(function: TracedFunction) -> bool:
    """Whether a ``tf.function`` has ``jit_compile=True``."""
    return bool(function._jit_compile)


def without_xla(function: TracedFunction) -> TracedFunction:
    """The same function, not compiled by XLA."""
    plain = function._clone(None)
    plain._jit_compile = None
    return plain


def is_in_xla(graph: Graph) -> bool:
    """Whether XLA will compile a graph, or a graph of which it is a part."""
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

    return bool(GraphOrParentsInXlaContext(graph))


def plain_variable(_: Callable[..., Any], **settings: Any) -> Variable:
    """A creator for ``tf.variable_creator_scope`` that calls no other creator.

    A ``tf.function`` does not allow new variables in its second trace, even within
    ``tf.init_scope``. Variables that are used only outside of the function should not
    be affected.
    """
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    wanted = ("initial_value", "trainable", "name", "dtype", "shape")
    variable: Variable = ResourceVariable(**{key: settings.get(key) for key in wanted})
    return variable


def user_frames() -> list[Frame]:
    """The frames of the current call stack, the innermost last.

    A frame of code that AutoGraph has generated refers to the original source.
    """
    from tensorflow.python.util import tf_stack

    return list(tf_stack.extract_stack().get_user_frames())


def is_generated(file: str) -> bool:
    """Whether AutoGraph has generated a file."""
    return "__autograph_generated" in file


def is_of_autograph(error: BaseException) -> bool:
    """Whether AutoGraph raised this error in place of an error during tracing."""
    return type(error).__name__ == "StagingError"


# --- tapes ----------------------------------------------------------------------------


def could_record() -> bool:
    """Whether a tape exists; True if this version of TensorFlow cannot tell."""
    try:
        # A version without this name has no such check.
        from tensorflow.python.eager import record
    except ImportError:
        return True
    return bool(getattr(record, "could_possibly_record", lambda: True)())


# --- eager operations -----------------------------------------------------------------


def is_eager(tensor: object) -> bool:
    """Whether a tensor has a value now; False for a tensor of a graph."""
    import tensorflow as tf

    return isinstance(tensor, tf.__internal__.EagerTensor)


def context() -> EagerContext:
    """The eager context of this process."""
    from tensorflow.python.eager import context as eager

    eager_context: EagerContext = eager.context()
    return eager_context


def is_running(context: EagerContext) -> bool:
    """Whether TensorFlow is initialized, so that its devices cannot change any more."""
    return context._context_handle is not None


def executor_type(name: str | None) -> AbstractContextManager[None]:
    """A context in which functions run with the named executor, or the default one."""
    from tensorflow.python.eager import context as eager

    selected: AbstractContextManager[None] = eager.function_executor_type(name)
    return selected


# --- checkpoints ----------------------------------------------------------------------


def add_saver(
    saver: Any,
    name: str,
    save: Callable[[Tensor], Sequence[Tensor]],
    restore: Callable[[Tensor], None],
) -> None:
    """Let TensorFlow's saver of variables save and restore more than these.

    ``save`` gets the prefix of the checkpoint with ``-name`` at its end. It returns the
    prefixes of what it has written, which is then merged. ``restore`` gets the prefix.
    """
    saver._registered_savers[name] = (save, restore)


def prefix_of(manager: CheckpointManager) -> str:
    """The folder of a manager's checkpoints and the beginning of their names."""
    return manager._prefix


def note_checkpoint(manager: CheckpointManager, path: str, time_s: float) -> None:
    """Register a checkpoint with a manager as if the manager had written it.

    ``time_s`` is the time when it was written, in seconds since the epoch. The manager
    forgets old checkpoints, and deletes their files if it finds them.
    """
    manager._latest_checkpoint = path
    manager._maybe_delete[path] = time_s
    manager._sweep()


# --- TensorFlow 1 ---------------------------------------------------------------------


def share_server(server: TF1Server, other: TF1Server) -> None:
    """Make ``server`` an alias of ``other``: both use the same native server."""
    server._server = other._server
    server._server_def = other._server_def


def is_same_server(server: TF1Server, other: TF1Server) -> bool:
    """Whether both use the same native server."""
    return server._server is other._server


def graph_of_manager(manager: SessionManager) -> Graph:
    """The graph of a manager's sessions."""
    return manager._graph


def look_more_often(manager: SessionManager, seconds: float) -> None:
    """Make a manager check for the chief's variables at least every ``seconds``."""
    manager._recovery_wait_secs = min(manager._recovery_wait_secs, seconds)


def learning_rate_of(optimizer: V1Optimizer) -> Tensor | None:
    """The learning rate of an optimizer that has applied gradients; None if unknown."""
    for name in ("_learning_rate_tensor", "_lr_t"):
        rate: Tensor | None = getattr(optimizer, name, None)
        if rate is not None:
            return rate
    return None


def token_queue(optimizer: SyncReplicasOptimizer) -> Queue:
    """The queue from which workers take a token before each step."""
    return optimizer._sync_token_queue

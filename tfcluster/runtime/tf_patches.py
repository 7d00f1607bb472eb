"""Every attribute of TensorFlow 2 that the runtime replaces.

TensorFlow is not imported here.
"""

from __future__ import annotations

from tfcluster.runtime.contract import Patch, Table
from tfcluster.runtime.scripts import program_kind

# --- gradients and graphs -------------------------------------------------------------

TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    "gradients that the program has combined itself",
)
ONE_TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    "exchange of the gradients of one tape",
    how="object",
)
ONE_TAPE_LOCAL = Patch(
    "tensorflow.GradientTape",
    "register_local_source",
    "variables local to each rank",
    how="object",
)
ONE_TAPE_DIVIDED = Patch(
    "tensorflow.GradientTape",
    "get_local_and_global_gradients",
    "gradients of variables local to each rank, apart from the others",
    how="object",
)
FUNCTION_CALL = Patch(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function",
    "__call__",
    "functions without XLA, unchanged errors of an exchange",
)
ONE_CONTEXT_INITIALIZED = Patch(
    "tensorflow.python.eager.context.Context",
    "ensure_initialized",
    "start of TensorFlow's server at the first op",
    how="object's dict",
)


# --- data -----------------------------------------------------------------------------

DATASET_ITER = Patch(
    "tensorflow.data.Dataset",
    "__iter__",
    "division of the batches of loops, iterators that end at once",
)
ITERATOR_NEXT = Patch(
    "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
    "__next__",
    "an averaging at the end of a loop's batches",
)
DATASET_PREFETCH = Patch(
    "tensorflow.data.Dataset", "prefetch", "reading equally far ahead on all ranks"
)
DATASET_CACHE = Patch("tensorflow.data.Dataset", "cache", "a cache file for each rank")
DATASET_SNAPSHOT = Patch(
    "tensorflow.data.Dataset", "snapshot", "a snapshot for each rank"
)
DATASET_SAVE = Patch(
    "tensorflow.data.Dataset", "save", "files written by the chief only"
)
TRACK = Patch(
    "tensorflow.python.trackable.base.Trackable",
    "_track_trackable",
    "ordinary iterators in checkpoints",
)
SET_SEED = Patch(
    "tensorflow.random", "set_seed", "a different order of the data on each rank"
)
GET_SEED = Patch(
    "tensorflow.python.framework.random_seed",
    "get_seed",
    "the numbers of one machine for ops with seeds, without a global seed",
)
NON_DETERMINISTIC_INTS = Patch(
    "tensorflow.python.ops.stateful_random_ops",
    "non_deterministic_ints",
    "generators without a seed that are equal on all ranks",
)

# --- files ----------------------------------------------------------------------------

CHECKPOINT_WRITE = Patch(
    "tensorflow.train.Checkpoint", "write", "files written by the chief only"
)
CHECKPOINT_SAVE = Patch(
    "tensorflow.train.Checkpoint", "save", "files written by the chief only"
)
CHECKPOINT_READ = Patch(
    "tensorflow.train.Checkpoint", "read", "restoring of slots on ps tasks"
)
CHECKPOINT_RESTORE = Patch(
    "tensorflow.train.Checkpoint", "restore", "restoring of slots on ps tasks"
)
MANAGER_SAVE = Patch(
    "tensorflow.train.CheckpointManager", "save", "files written by the chief only"
)
CHECKPOINT_SAVER = Patch(
    "tensorflow.python.checkpoint.functional_saver.MultiDeviceSaver",
    "__init__",
    "checkpoints of weights that are divided by rows",
)
SAVED_MODEL_SAVE = Patch(
    "tensorflow.saved_model", "save", "files written by the chief only"
)
SUMMARY_WRITER = Patch(
    "tensorflow.summary",
    "create_file_writer",
    "event files written by the chief only",
    how="function",
)

# --- functions ------------------------------------------------------------------------

CALL_FUNCTION = Patch(
    "tensorflow.python.eager.context.Context",
    "call_function",
    "division of functions among the ranks",
)
FLAT_CALL = Patch(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction",
    "_call_flat",
    "division of functions whose gradients a tape computes",
)

VARIABLE_HANDLE = Patch(
    "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable",
    "handle",
    "whole values of variables of which ranks hold pieces",
    how="property",
)

TRACE = Patch(
    "tensorflow.python.eager.polymorphic_function.tracing_compilation",
    "_create_concrete_function",
    "functions of any number of rows",
)

# --- variables ------------------------------------------------------------------------

VARIABLE_CLASS = Patch(
    "tensorflow.python.ops.resource_variable_ops.ResourceVariable",
    "__class__",
    "weights that are divided by rows, outside of functions",
    how="object",
)

# --- strategies of TensorFlow's -------------------------------------------------------

NEW_STRATEGY = Patch(
    "tensorflow.python.distribute.distribute_lib.StrategyBase",
    "__new__",
    "refusal of a second division of batches",
)

PATCHES = tuple(patch for patch in list(vars().values()) if isinstance(patch, Patch))
TABLE = Table(PATCHES, program_kind.distributes_itself)

"""Every attribute of TensorFlow 2 that the runtime replaces.

TensorFlow is not imported here. An attribute's handlers are called in the order of the
table, whether they belong to the hooks on Keras or to modules below. ``python -m
tfcluster.runtime.keras.patches`` prints this table as well.
"""

from __future__ import annotations

from tfcluster.runtime.contract import Handler, Patch, Table
from tfcluster.runtime.scripts import program_kind

EACH = "every strategy"
IN_STEP = "ranks in step"
LOCAL = "local_sgd"
ASYNC = "asynchronous parameter servers"
SERVED = "parameter servers"
DATA = "data tasks"
OWN = "Horovod's API"
VERIFY = "tfcluster verify"
EXPLAIN = "tfcluster explain"
"""When a handler is installed."""


def in_keras(function: str, when: str, *, always: bool = False) -> Handler:
    """A handler in ``tfcluster.runtime.keras``."""
    return Handler(f"keras.{function}", when, always)


def _is_in_keras(handler: Handler) -> bool:
    return handler.function.startswith("keras.")


SAVED = in_keras("train.chief_only_saving.ChiefOnlySaving._saved_as", EACH)
_ALL_SLOTS = in_keras("strategies.ps_models.ServerModels._with_all_slots", SERVED)

# --- gradients and graphs -------------------------------------------------------------

TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    (Handler("exchange.reduced_tensors.ReducedTensors.gradients", EACH),),
    "gradients that the program has combined itself",
)
ONE_TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    (Handler("horovod.tape.DistributedGradientTape", OWN, True),),
    "exchange of the gradients of one tape",
    how="object",
)
ONE_TAPE_LOCAL = Patch(
    "tensorflow.GradientTape",
    "register_local_source",
    (Handler("horovod.tape.DistributedGradientTape", OWN, True),),
    "variables local to each rank",
    how="object",
)
FUNCTION_CALL = Patch(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function",
    "__call__",
    (
        in_keras("train.xla_fallback.XlaFallback._call", EACH),
        Handler("exchange.error_translation._call", "tfcluster is used", True),
    ),
    "functions without XLA, unchanged errors of an exchange",
)
ONE_CONTEXT_INITIALIZED = Patch(
    "tensorflow.python.eager.context.Context",
    "ensure_initialized",
    (
        Handler(
            "collective.transports.tensorflow.lazy_server.arrange",
            "transport: tensorflow",
            True,
        ),
    ),
    "start of TensorFlow's server at the first op",
    how="object's dict",
)


# --- data -----------------------------------------------------------------------------

DATASET_ITER = Patch(
    "tensorflow.data.Dataset",
    "__iter__",
    (
        in_keras("data.round_robin_sharding.LoopBatches._iter", ASYNC),
        in_keras("data.data_service_hooks.DataServiceHooks._iter", DATA),
        in_keras("data.disable_autotune._iter", EACH),
    ),
    "division of the batches of loops, iterators that end at once",
)
ITERATOR_NEXT = Patch(
    "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
    "__next__",
    (in_keras("strategies.local_sgd.LocalSgd._next", LOCAL),),
    "an averaging at the end of a loop's batches",
)
DATASET_CACHE = Patch(
    "tensorflow.data.Dataset",
    "cache",
    (in_keras("data.cache_files._of_this_rank", "ranks other than the chief"),),
    "a cache file for each rank",
)
DATASET_SNAPSHOT = Patch(
    "tensorflow.data.Dataset",
    "snapshot",
    (in_keras("data.cache_files._of_this_rank", "ranks other than the chief"),),
    "a snapshot for each rank",
)
DATASET_SAVE = Patch(
    "tensorflow.data.Dataset", "save", (SAVED,), "files written by the chief only"
)
SET_SEED = Patch(
    "tensorflow.random",
    "set_seed",
    (in_keras("data.per_rank_shuffle._set_seed", "data: seed_offset"),),
    "a different order of the data on each rank",
)

# --- files ----------------------------------------------------------------------------

CHECKPOINT_WRITE = Patch(
    "tensorflow.train.Checkpoint",
    "write",
    (SAVED, _ALL_SLOTS),
    "files written by the chief only",
)
CHECKPOINT_SAVE = Patch(
    "tensorflow.train.Checkpoint",
    "save",
    (
        in_keras("train.chief_only_saving.ChiefOnlySaving._save_of_checkpoint", EACH),
        _ALL_SLOTS,
    ),
    "files written by the chief only",
)
CHECKPOINT_READ = Patch(
    "tensorflow.train.Checkpoint",
    "read",
    (_ALL_SLOTS,),
    "restoring of slots on ps tasks",
)
CHECKPOINT_RESTORE = Patch(
    "tensorflow.train.Checkpoint",
    "restore",
    (_ALL_SLOTS,),
    "restoring of slots on ps tasks",
)
MANAGER_SAVE = Patch(
    "tensorflow.train.CheckpointManager",
    "save",
    (
        in_keras("train.chief_only_saving.ChiefOnlySaving._save_of_manager", EACH),
        _ALL_SLOTS,
    ),
    "files written by the chief only",
)
SAVED_MODEL_SAVE = Patch(
    "tensorflow.saved_model",
    "save",
    (SAVED, _ALL_SLOTS),
    "files written by the chief only",
)
_NO_WRITER = (
    in_keras(
        "train.chief_only_saving._no_writer",
        "chief_only: summary, ranks other than the chief",
        always=True,
    ),
)
SUMMARY_WRITER = Patch(
    "tensorflow.summary",
    "create_file_writer",
    _NO_WRITER,
    "event files written by the chief only",
)
SUMMARY_WRITER_2 = Patch(
    "tensorflow.compat.v2.summary",
    "create_file_writer",
    _NO_WRITER,
    "event files written by the chief only",
)

# --- functions ------------------------------------------------------------------------

CALL_FUNCTION = Patch(
    "tensorflow.python.eager.context.Context",
    "call_function",
    (
        Handler("partition.hook.Hook.call", IN_STEP),
        Handler("partition.watch.Watch.call", EXPLAIN),
        in_keras("train.eager_gradients.OptimizerSteps.after_call", "one rank"),
    ),
    "division of functions among the ranks",
)
FLAT_CALL = Patch(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction",
    "_call_flat",
    (Handler("partition.hook.Hook.flat_call", f"{IN_STEP}, {EXPLAIN}"),),
    "division of functions whose gradients a tape computes",
)

TRACE = Patch(
    "tensorflow.python.eager.polymorphic_function.tracing_compilation",
    "_create_concrete_function",
    (in_keras("data.unknown_rows._trace", "batch: per_worker"),),
    "functions of any number of rows",
)

# --- strategies of TensorFlow's -------------------------------------------------------

_REFUSE = "strategies.partitioned._refuse"


def _strategy(name: str, function: str) -> Patch:
    return Patch(
        f"tensorflow.distribute.{name}",
        "__init__",
        (in_keras(function, EACH),),
        "refusal of a second division of batches",
    )


# The experimental names of the first two are the same class, and a derived one.
STRATEGIES_OF_CLUSTERS = tuple(
    _strategy(name, _REFUSE)
    for name in (
        "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
        "experimental.TPUStrategy",
    )
)
STRATEGIES_OF_ONE_HOST = tuple(
    _strategy(name, f"{_REFUSE}_replicas")
    for name in ("MirroredStrategy", "experimental.CentralStorageStrategy")
)

PATCHES = (
    *(each for each in list(vars().values()) if isinstance(each, Patch)),
    *STRATEGIES_OF_CLUSTERS,
    *STRATEGIES_OF_ONE_HOST,
)
PATCHES_WITHOUT_KERAS = tuple(
    patch
    for patch in PATCHES
    if any(each.always and not _is_in_keras(each) for each in patch.handlers)
)
"""Patches with a handler that is also installed without the hooks on Keras."""
TABLE = Table(PATCHES, program_kind.distributes_itself)

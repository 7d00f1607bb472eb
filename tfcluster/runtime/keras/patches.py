"""Every attribute of Keras that the runtime replaces. Keras is not imported here."""

from __future__ import annotations

from tfcluster.runtime.contract import Patch, Table
from tfcluster.runtime.scripts import program_kind

# --- optimizers -----------------------------------------------------------------------

OPTIMIZER_APPLY = Patch(
    "keras.optimizers.Optimizer",
    "apply",
    "eager gradients, steps, updates on ps tasks, averaging",
)
LOSS_SCALE_APPLY = Patch(
    "keras.optimizers.LossScaleOptimizer",
    "apply",
    "eager gradients before the check for infinities",
)
OPTIMIZER_FINALIZE = Patch(
    "keras.optimizers.Optimizer",
    "finalize_variable_values",
    "final weights from averages on ps tasks",
)
OPTIMIZER_VARIABLES = Patch(
    "keras.optimizers.Optimizer",
    "variables",
    "reads of slots on ps tasks",
    how="property",
)
SWAP_EMA = Patch(
    "keras.callbacks.SwapEMAWeights",
    "_swap_variables",
    "validation with averages on ps tasks",
)
ONE_OPTIMIZER_APPLY = Patch(
    "keras.optimizers.Optimizer",
    "apply",
    "exchange of the gradients of one optimizer",
    how="object's dict",
)
ONE_OPTIMIZER_LOCAL = Patch(
    "keras.optimizers.Optimizer",
    "register_local_var",
    "variables local to each rank",
    how="object's dict",
)

# --- models ---------------------------------------------------------------------------

MODEL_FIT = Patch(
    "keras.Model",
    "fit",
    "callbacks in step, files of the chief only",
    how="inherited",
)
MODEL_EVALUATE = Patch(
    "keras.Model",
    "evaluate",
    "files of callbacks",
    how="inherited",
)
MODEL_PREDICT = Patch(
    "keras.Model",
    "predict",
    "files of callbacks",
    how="inherited",
)
MODEL_TRAIN_ON_BATCH = Patch(
    "keras.Model",
    "train_on_batch",
    "batches of asynchronous ranks, means of local_sgd",
    how="inherited",
)
MODEL_TEST_ON_BATCH = Patch(
    "keras.Model", "test_on_batch", "batches of asynchronous ranks", how="inherited"
)
MODEL_COMPILE = Patch(
    "keras.Model",
    "compile",
    "corrections of what Keras sets up for optimizers of Horovod",
    how="inherited",
)
MODEL_METRICS_RESULT = Patch(
    "keras.Model", "get_metrics_result", "metrics of all ranks' rows", how="inherited"
)
MODEL_EXPORT = Patch("keras.Model", "export", "files written by the chief only")

# --- layers, losses, random numbers, metrics ------------------------------------------

LAYER_GET_WEIGHTS = Patch(
    "keras.Layer", "get_weights", "reads of weights combined over all ranks"
)
VARIABLE_INITIALIZE = Patch(
    "keras.Variable",
    "_initialize_with_initializer",
    "weights that are divided by rows",
)
VARIABLE_ASSIGN = Patch(
    "keras.Variable", "assign", "assignments by the program", how="inherited"
)

# --- data -----------------------------------------------------------------------------

EPOCH_ITERATOR = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "__init__",
    "sharded batches in fit, batches from data tasks, or batches per worker",
)
ONE_EPOCH_ITERATOR_CLASS = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "__class__",
    "the number of batches of this rank, or passes of any number of batches",
    how="object",
)
GET_FILE = Patch(
    "keras.src.utils.file_utils",
    "get_file",
    "one download for each host",
    how="function",
)

# --- files ----------------------------------------------------------------------------

SAVE_MODEL = Patch(
    "keras.src.saving.saving_api",
    "save_model",
    "files written by the chief only",
    how="function",
)
SAVE_WEIGHTS = Patch(
    "keras.src.saving.saving_api",
    "save_weights",
    "files written by the chief only",
    how="function",
)
_BY_ROWS = "weights that are divided by rows, saved chunk by chunk"
STORE_ENTRY = Patch(
    "keras.src.saving.saving_lib.H5IOStore", "__setitem__", _BY_ROWS, optional=True
)
STORED_ENTRY = Patch(
    "keras.src.saving.saving_lib.H5IOStore",
    "__getitem__",
    "weights that are divided by rows, of which a rank loads its own rows",
    optional=True,
)
STORE_IN_MEMORY = Patch(
    "keras.src.saving.saving_lib",
    "is_memory_sufficient",
    _BY_ROWS,
    how="function",
    optional=True,
)
SAVE_OPTIMIZER = Patch(
    "keras.optimizers.Optimizer", "save_own_variables", _BY_ROWS, how="inherited"
)
MAKEDIRS = Patch(
    "keras.src.utils.file_utils", "makedirs", "folders created by several ranks at once"
)
PRINT_MSG = Patch("keras.src.utils.io_utils", "print_msg", "messages printed once")
BACKUP_SAVE, BACKUP_TRAIN_END = (
    Patch(
        "keras.callbacks.BackupAndRestore",
        name,
        "backups written and removed by the chief only",
    )
    for name in ("_save_model", "on_train_end")
)

PATCHES = tuple(patch for patch in list(vars().values()) if isinstance(patch, Patch))
TABLE = Table(PATCHES, program_kind.distributes_itself)

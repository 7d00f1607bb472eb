"""Every attribute of Keras that the runtime replaces.

``python -m tfcluster.runtime.keras.patches`` prints this table and the table of
TensorFlow 2 (``tf_patches``). Neither library is imported here. An attribute's handlers
are called in the order of the table.
"""

from __future__ import annotations

import sys

from tfcluster.runtime import tf_patches
from tfcluster.runtime.contract import Handler, Patch, Table
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.tf_patches import (
    ASYNC,
    DATA,
    EACH,
    IN_STEP,
    LOCAL,
    OWN,
    SAVED,
    SERVED,
    VERIFY,
    in_keras,
)

_LOCAL = "strategies.local_sgd_models.LocalSgdModels"
_ASYNC = "strategies.async_parameter_server.AsyncRank"
_RECORD = "step_recorder.StepRecorder"
_RECORD_APPLY = in_keras(f"{_RECORD}._apply", VERIFY, always=True)
_RECORD_RESULT = in_keras(f"{_RECORD}._result", VERIFY, always=True)
_SERVED_UPDATES = "strategies.served_updates.ServedUpdates"
_WITHOUT_XLA = in_keras(f"{_SERVED_UPDATES}._without_xla", SERVED)

# --- optimizers -----------------------------------------------------------------------

OPTIMIZER_APPLY = Patch(
    "keras.optimizers.Optimizer",
    "apply",
    (
        _RECORD_APPLY,
        in_keras("train.eager_gradients.EagerGradients.apply", IN_STEP),
        in_keras("strategies.local_sgd.LocalSgd._apply", LOCAL),
        in_keras(f"{_SERVED_UPDATES}._apply", SERVED),
    ),
    "eager gradients, steps, updates on ps tasks, averaging",
)
LOSS_SCALE_APPLY = Patch(
    "keras.optimizers.LossScaleOptimizer",
    "apply",
    (
        _RECORD_APPLY,
        in_keras("train.eager_gradients.EagerGradients.apply", IN_STEP),
        in_keras("strategies.local_sgd.LocalSgd._apply", LOCAL),
    ),
    "eager gradients before the check for infinities",
)
OPTIMIZER_FINALIZE = Patch(
    "keras.optimizers.Optimizer",
    "finalize_variable_values",
    (in_keras("strategies.ps_models.ServerModels._finalize", SERVED),),
    "final weights from averages on ps tasks",
)
OPTIMIZER_VARIABLES = Patch(
    "keras.optimizers.Optimizer",
    "variables",
    (in_keras("strategies.ps_models.ServerModels._variables", SERVED),),
    "reads of slots on ps tasks",
    how="property",
)
SWAP_EMA = Patch(
    "keras.callbacks.SwapEMAWeights",
    "_swap_variables",
    (in_keras("strategies.ps_models.ServerModels._swap", SERVED),),
    "validation with averages on ps tasks",
)
ONE_OPTIMIZER_APPLY = Patch(
    "keras.optimizers.Optimizer",
    "apply",
    (Handler("horovod.keras_optimizer.distribute", OWN, True),),
    "exchange of the gradients of one optimizer",
    how="object's dict",
)
ONE_OPTIMIZER_LOCAL = Patch(
    "keras.optimizers.Optimizer",
    "register_local_var",
    (Handler("horovod.keras_optimizer.distribute", OWN, True),),
    "variables local to each rank",
    how="object's dict",
)

# --- models ---------------------------------------------------------------------------

_PARTITIONED = "train.partitioned_models.PartitionedModels"

MODEL_FIT = Patch(
    "keras.Model",
    "fit",
    (
        in_keras(f"{_RECORD}._fit", VERIFY, always=True),
        in_keras("train.evaluators._refuse", "evaluators", always=True),
        in_keras(f"{_PARTITIONED}._fit", EACH),
        _WITHOUT_XLA,
    ),
    "callbacks in step, files and progress of the chief only",
    how="inherited",
)
MODEL_EVALUATE = Patch(
    "keras.Model",
    "evaluate",
    (
        _RECORD_RESULT,
        in_keras(f"{_PARTITIONED}._evaluate", EACH),
    ),
    "progress of the chief only, files of callbacks",
    how="inherited",
)
MODEL_PREDICT = Patch(
    "keras.Model",
    "predict",
    (in_keras(f"{_PARTITIONED}._predict", EACH),),
    "progress of the chief only, files of callbacks",
    how="inherited",
)
MODEL_TRAIN_ON_BATCH = Patch(
    "keras.Model",
    "train_on_batch",
    (
        _RECORD_RESULT,
        in_keras(f"{_LOCAL}._train_on_batch", LOCAL),
        in_keras(f"{_ASYNC}._train_on_batch", ASYNC),
        _WITHOUT_XLA,
    ),
    "batches of asynchronous ranks, means of local_sgd",
    how="inherited",
)
MODEL_TEST_ON_BATCH = Patch(
    "keras.Model",
    "test_on_batch",
    (_RECORD_RESULT,),
    "batches of asynchronous ranks",
    how="inherited",
)
MODEL_COMPILE = Patch(
    "keras.Model",
    "compile",
    (Handler("horovod.keras_optimizer._compile", OWN, True),),
    "corrections of what Keras sets up for optimizers of Horovod",
    how="inherited",
)
MODEL_METRICS_RESULT = Patch(
    "keras.Model",
    "get_metrics_result",
    (in_keras(f"{_LOCAL}._metrics_result", LOCAL),),
    "metrics of all ranks' rows",
    how="inherited",
)
MODEL_EXPORT = Patch(
    "keras.Model", "export", (SAVED,), "files written by the chief only"
)

# --- layers, losses, random numbers, metrics ------------------------------------------

LAYER_GET_WEIGHTS = Patch(
    "keras.Layer",
    "get_weights",
    (
        in_keras(f"{_LOCAL}._get_weights", LOCAL),
        in_keras(f"{_ASYNC}._get_weights", ASYNC),
    ),
    "reads of weights combined over all ranks",
)
VARIABLE_ASSIGN = Patch(
    "keras.Variable",
    "assign",
    (in_keras("strategies.ps_models.ServerModels._assign", SERVED),),
    "assignments by the program",
    how="inherited",
)

# --- data -----------------------------------------------------------------------------

EPOCH_ITERATOR = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "__init__",
    (
        in_keras("data.round_robin_sharding.FitBatches._begin", ASYNC),
        in_keras("data.data_service_hooks.DataServiceHooks._epochs", DATA),
        in_keras("data.unknown_rows._begin", "batch: per_worker"),
    ),
    "sharded batches in fit, batches from data tasks, or batches per worker",
)
ONE_EPOCH_ITERATOR_CLASS = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "__class__",
    (
        in_keras("data.round_robin_sharding._shard_epochs", ASYNC),
        in_keras("data.data_service_hooks._leave_uncounted", DATA),
    ),
    "the number of batches of this rank, or passes of any number of batches",
    how="object",
)
GET_FILE = Patch(
    "keras.src.utils.file_utils",
    "get_file",
    (in_keras("data.downloads.Downloads._get_file", "several ranks"),),
    "one download for each host",
    how="function",
)

# --- files ----------------------------------------------------------------------------

SAVE_MODEL = Patch(
    "keras.src.saving.saving_api",
    "save_model",
    (SAVED,),
    "files written by the chief only",
    how="function",
)
SAVE_WEIGHTS = Patch(
    "keras.src.saving.saving_api",
    "save_weights",
    (SAVED,),
    "files written by the chief only",
    how="function",
)
MAKEDIRS = Patch(
    "keras.src.utils.file_utils",
    "makedirs",
    (in_keras("train.chief_only_saving._make_once", EACH),),
    "folders created by several ranks at once",
)
PRINT_MSG = Patch(
    "keras.src.utils.io_utils",
    "print_msg",
    (in_keras("train.chief_only_saving._say_nothing", "ranks other than the chief"),),
    "messages printed once",
)
BACKUP_SAVE, BACKUP_TRAIN_END = (
    Patch(
        "keras.callbacks.BackupAndRestore",
        name,
        (in_keras("train.chief_only_saving.ChiefOnlySaving._by_the_chief", EACH),),
        "backups written and removed by the chief only",
    )
    for name in ("_save_model", "on_train_end")
)

PATCHES = tuple(each for each in list(vars().values()) if isinstance(each, Patch))
TABLE = Table(PATCHES, program_kind.distributes_itself)


def text() -> str:
    """This table and the table of TensorFlow 2, as text."""
    return TABLE.text() + tf_patches.TABLE.text()


if __name__ == "__main__":
    sys.stdout.write(text())

"""Every attribute of Keras and TensorFlow 2 that the runtime replaces.

``python -m tfcluster.runtime.keras.patches`` prints the table. Neither library is
imported here. An attribute's handlers are called in the order of the table.
"""

from __future__ import annotations

import sys

from tfcluster.runtime.contract import Called, Handler, Patch, Table
from tfcluster.runtime.scripts import program_kind

_EACH = "every strategy"
_IN_STEP = "ranks in step"
_ASYNC = "asynchronous parameter servers"
_SERVED = "parameter servers"
_DATA = "data tasks"
_OWN = "Horovod's API"
_VERIFY = "tfcluster verify"


def _in_keras(
    function: str, when: str, called: Called = "around", *, always: bool = False
) -> Handler:
    return Handler(f"keras.{function}", when, always, called)


_RECORD = "step_recorder.StepRecorder"
_RECORD_APPLY = _in_keras(f"{_RECORD}._apply", _VERIFY, always=True)
_RECORD_RESULT = _in_keras(f"{_RECORD}._result", _VERIFY, always=True)
_RECORD_CLIP = _in_keras(f"{_RECORD}._clip", _VERIFY, "before", always=True)
_APPLY = "train.optimizer_hook.OptimizerHook._apply"
_SAVED = _in_keras("train.chief_only_saving.ChiefOnlySaving._saved_as", _EACH)
_ALL_SLOTS = _in_keras("strategies.ps_models.ServerModels._with_all_slots", _SERVED)

# --- optimizers -----------------------------------------------------------------------

OPTIMIZER_APPLY = Patch(
    "keras.optimizers.Optimizer",
    "apply",
    (_RECORD_APPLY, _in_keras(_APPLY, _EACH)),
    "exchange of gradients",
)
LOSS_SCALE_APPLY = Patch(
    "keras.optimizers.LossScaleOptimizer",
    "apply",
    (
        _RECORD_APPLY,
        _in_keras(_APPLY, "collective, local_sgd"),
        _in_keras(f"{_APPLY}_loss_scaled", _SERVED),
    ),
    "exchange of gradients before the check for infinities",
)
OPTIMIZER_BUILD = Patch(
    "keras.optimizers.Optimizer",
    "build",
    (_in_keras("train.tape_gradients.TapeGradients._build", _IN_STEP),),
    "detection of the tape gradients used for training",
)
OPTIMIZER_SAVE = Patch(
    "keras.optimizers.Optimizer",
    "save_own_variables",
    (_in_keras("strategies.ps_models.ServerModels._with_slots", _SERVED),),
    "saving of slots on ps tasks",
)
OPTIMIZER_FINALIZE = Patch(
    "keras.optimizers.Optimizer",
    "finalize_variable_values",
    (_in_keras("strategies.ps_models.ServerModels._finalize", _SERVED),),
    "final weights from averages on ps tasks",
)
OPTIMIZER_VARIABLES = Patch(
    "keras.optimizers.Optimizer",
    "variables",
    (_in_keras("strategies.ps_models.ServerModels._variables", _SERVED),),
    "reads of slots on ps tasks",
    how="property",
)
SWAP_EMA = Patch(
    "keras.callbacks.SwapEMAWeights",
    "_swap_variables",
    (_in_keras("strategies.ps_models.ServerModels._swap", _SERVED),),
    "validation with averages on ps tasks",
)
ONE_OPTIMIZER_APPLY = Patch(
    "keras.optimizers.Optimizer",
    "apply",
    (Handler("horovod.keras_optimizer.distribute", _OWN, True),),
    "exchange of the gradients of one optimizer",
    how="object's dict",
)
ONE_OPTIMIZER_LOCAL = Patch(
    "keras.optimizers.Optimizer",
    "register_local_var",
    (Handler("horovod.keras_optimizer.distribute", _OWN, True),),
    "variables local to each rank",
    how="object's dict",
)

# --- models ---------------------------------------------------------------------------

_ENTRY = "train.model_methods.ModelMethods"

MODEL_FIT = Patch(
    "keras.Model",
    "fit",
    (
        _in_keras(f"{_RECORD}._fit", _VERIFY, always=True),
        _in_keras("checks.own_exchanges.OwnExchanges._fit", _EACH),
        _in_keras(f"{_ENTRY}._fit", _EACH),
    ),
    "training on a part of each batch, callbacks in step",
    how="inherited",
)
MODEL_EVALUATE = Patch(
    "keras.Model",
    "evaluate",
    (_RECORD_RESULT, _in_keras(f"{_ENTRY}._evaluate", _EACH)),
    "evaluation on a part of each batch",
    how="inherited",
)
MODEL_PREDICT = Patch(
    "keras.Model",
    "predict",
    (
        _in_keras("data.data_service_hooks.DataServiceHooks._predict", _DATA),
        _in_keras(f"{_ENTRY}._predict", _EACH),
    ),
    "prediction of all rows on each rank",
    how="inherited",
)
MODEL_TRAIN_ON_BATCH = Patch(
    "keras.Model",
    "train_on_batch",
    (_RECORD_RESULT, _in_keras(f"{_ENTRY}._train_on_batch", _EACH)),
    "training on a part of a batch",
    how="inherited",
)
MODEL_TEST_ON_BATCH = Patch(
    "keras.Model",
    "test_on_batch",
    (_RECORD_RESULT, _in_keras(f"{_ENTRY}._test_on_batch", _EACH)),
    "evaluation on a part of a batch",
    how="inherited",
)
MODEL_PREDICT_ON_BATCH = Patch(
    "keras.Model",
    "predict_on_batch",
    (_in_keras(f"{_ENTRY}._predict", _EACH),),
    "prediction of all rows on each rank",
    how="inherited",
)
MODEL_COMPILE = Patch(
    "keras.Model",
    "compile",
    (
        Handler("horovod.keras_optimizer._compile", _OWN, True),
        _in_keras(f"{_ENTRY}._compile", _EACH),
    ),
    "models without XLA",
    how="inherited",
)
MODEL_MAKE_TRAIN_FUNCTION = Patch(
    "keras.Model",
    "make_train_function",
    (_in_keras("checks.trial_steps.TrialSteps._make", _IN_STEP),),
    "test of custom losses",
    how="inherited",
)
MODEL_METRICS_RESULT = Patch(
    "keras.Model",
    "get_metrics_result",
    (_in_keras("train.metrics.Metrics._model_result", _IN_STEP),),
    "metrics of all ranks' rows",
    how="inherited",
)
MODEL_RESULT_OR_LOGS = Patch(
    "keras.Model",
    "_get_metrics_result_or_logs",
    (_in_keras("train.metrics.Metrics._result_or_logs", _IN_STEP),),
    "metrics of all ranks' rows",
    how="inherited",
)
MODEL_EXPORT = Patch(
    "keras.Model", "export", (_SAVED,), "files written by the chief only"
)
ONE_MODEL_TRAIN_STEP = Patch(
    "keras.Model",
    "train_step",
    (
        _in_keras("train.sharded_steps.divide_steps", _IN_STEP),
        _in_keras("train.metrics.Metrics.watch_steps", _IN_STEP),
    ),
    "custom steps on a part of each batch",
    how="object's dict",
)
ONE_MODEL_TEST_STEP = Patch(
    "keras.Model",
    "test_step",
    (
        _in_keras("train.sharded_steps.divide_steps", _IN_STEP),
        _in_keras("train.metrics.Metrics.watch_steps", _IN_STEP),
    ),
    "custom steps on a part of each batch",
    how="object's dict",
)
ONE_MODEL_TRAIN_FUNCTION = Patch(
    "keras.Model",
    "train_function",
    (
        _in_keras("train.injected_callbacks.prove_first_step", _EACH),
        _in_keras("checks.trial_steps.TrialSteps._make", _IN_STEP),
        _in_keras("train.xla_fallback.without_xla", _EACH),
        Handler("horovod.load_model.load_model", _OWN, True),
    ),
    "check in the first step that gradients are exchanged",
    how="object",
)
ONE_MODEL_TEST_FUNCTION = Patch(
    "keras.Model",
    "test_function",
    (_in_keras("train.xla_fallback.without_xla", _EACH),),
    "models without XLA",
    how="object",
)

# --- layers, losses, metrics ----------------------------------------------------------

LAYER_CALL = Patch(
    "keras.Layer",
    "__call__",
    (_in_keras("train.moving_statistics.MovingStatistics._call", _IN_STEP),),
    "state of custom layers over all rows",
    how="inherited",
)
LAYER_GET_WEIGHTS = Patch(
    "keras.Layer",
    "get_weights",
    (_in_keras(f"{_ENTRY}._get_weights", _EACH),),
    "reads of weights combined over all ranks",
)
NORMALIZATION_MOMENTS = Patch(
    "keras.layers.BatchNormalization",
    "_moments",
    (_in_keras("train.sync_batch_norm.SyncBatchNorm._moments", _IN_STEP),),
    "BatchNormalization(synchronized=True)",
)
VARIABLE_ASSIGN = Patch(
    "keras.Variable",
    "assign",
    (
        _in_keras("train.assign_hook.AssignHook._assign", _IN_STEP),
        _in_keras("strategies.ps_models.ServerModels._assign", _SERVED),
    ),
    "metrics by rows, state of layers, assignments by the program",
    how="inherited",
)
LOSS_CALL = Patch(
    "keras.losses.Loss",
    "__call__",
    (_in_keras("train.whole_batch_losses.WholeBatchLosses._call", _IN_STEP),),
    "losses that depend on the batch as a whole; a check for sums over rows",
)
REDUCE_WEIGHTED_VALUES = Patch(
    "keras.src.losses.loss",
    "reduce_weighted_values",
    (_in_keras("train.loss_rescaling.LossRescaling._reduce", _IN_STEP),),
    "losses that are summed, weighted or masked",
)
COMPUTE_AVERAGE_LOSS = Patch(
    "tensorflow.nn",
    "compute_average_loss",
    (_in_keras("train.loss_rescaling.LossRescaling._average", _IN_STEP),),
    "losses divided by a global batch size",
)
_DRAWS = "train.row_draws.RowDraws"
SEED_GENERATOR_NEXT = Patch(
    "keras.random.SeedGenerator",
    "next",
    (_in_keras(f"{_DRAWS}._next", _IN_STEP),),
    "different random numbers on each rank where they cannot be those of rows",
)


def _stateless(name: str, function: str) -> Patch:
    return Patch(
        "tensorflow.python.ops.gen_stateless_random_ops_v2",
        f"stateless_{name}",
        (_in_keras(f"{_DRAWS}.{function}", _IN_STEP),),
        "the random numbers of a rank's rows in the whole batch",
    )


STATELESS_UNIFORM = _stateless("random_uniform_v2", "_skipping")
STATELESS_NORMAL = _stateless("random_normal_v2", "_skipping")
STATELESS_UNIFORM_INT = _stateless("random_uniform_int_v2", "_slicing")
STATELESS_TRUNCATED_NORMAL = _stateless("truncated_normal_v2", "_slicing")


_STATES = "train.stateful_draws.StatefulDraws"


def _draw(module: str, name: str, function: str) -> Patch:
    return Patch(
        f"tensorflow.python.ops.{module}",
        name,
        (_in_keras(function, _IN_STEP),),
        "the random numbers of a rank's rows in the whole batch",
    )


STATEFUL_NORMAL = _draw(
    "gen_random_ops", "random_standard_normal", f"{_STATES}._normal"
)
STATEFUL_UNIFORM = _draw("gen_random_ops", "random_uniform", f"{_STATES}._uniform")
STATEFUL_TRUNCATED_NORMAL = _draw(
    "gen_random_ops", "truncated_normal", f"{_STATES}._truncated_normal"
)
STATEFUL_UNIFORM_INT = _draw(
    "gen_random_ops", "random_uniform_int", f"{_STATES}._uniform_int"
)
DRAWS_PER_PARAMETER = tuple(
    _draw("gen_random_ops", name, f"{_STATES}._per_parameter")
    for name in ("random_gamma", "random_poisson_v2")
)
DRAWS_BY_PARAMETERS = tuple(
    _draw(module, name, f"{_DRAWS}._by_parameters")
    for module, name in (
        ("gen_stateless_random_ops", "stateless_random_binomial"),
        ("gen_stateless_random_ops", "stateless_random_poisson"),
        ("gen_stateless_random_ops_v2", "stateless_random_gamma_v3"),
    )
)
CATEGORICAL_DRAWS = tuple(
    _draw(module, name, f"{_DRAWS}._categorical")
    for module, name in (
        ("gen_random_ops", "multinomial"),
        ("gen_stateless_random_ops", "stateless_multinomial"),
    )
)
GENERATOR_SKIP = Patch(
    "tensorflow.random.Generator",
    "_prepare_key_counter",
    (_in_keras(f"{_STATES}._generator", _IN_STEP),),
    "generators advance by the numbers of the whole batch",
)
KERAS_SHUFFLE = Patch(
    "keras.src.backend.tensorflow.random",
    "shuffle",
    (_in_keras(f"{_DRAWS}._shuffle_of_keras", _IN_STEP),),
    "a warning about shuffles of rows; other shuffles are the same on all ranks",
)
TENSORFLOW_SHUFFLE = Patch(
    "tensorflow.python.ops.gen_random_ops",
    "random_shuffle",
    (_in_keras(f"{_DRAWS}._shuffle_of_tensorflow", _IN_STEP),),
    "a warning about shuffles of rows",
)
DATASET_FUNCTION = Patch(
    "tensorflow.python.data.ops.structured_function.StructuredFunctionWrapper",
    "__init__",
    (_in_keras(f"{_DRAWS}._alike", _IN_STEP),),
    "random numbers in functions of datasets, which get whole batches",
)
INITIALIZER_CALL = Patch(
    "keras.initializers.Initializer",
    "__call__",
    (_in_keras(f"{_DRAWS}._alike", _IN_STEP),),
    "the same initial values on all ranks",
    how="each class",
)
_UPDATE_STATE = _in_keras("train.metrics.Metrics._update_state", _IN_STEP)
MEAN_UPDATE = Patch(
    "keras.metrics.Mean",
    "update_state",
    (_UPDATE_STATE, _in_keras("train.metrics.Metrics._update_mean", _IN_STEP)),
    "means of numbers that belong to a whole batch",
)
SUM_UPDATE = Patch(
    "keras.metrics.Sum",
    "update_state",
    (_UPDATE_STATE, _in_keras("train.metrics.Metrics._update_sum", _IN_STEP)),
    "sums of numbers that belong to a whole batch",
)
METRIC_UPDATE = Patch(
    "keras.metrics.Metric",
    "update_state",
    (_UPDATE_STATE,),
    "metrics of all ranks' rows",
    how="each class",
    but=("keras.metrics.Mean", "keras.metrics.Sum"),
)
METRIC_RESULT = Patch(
    "keras.metrics.Metric",
    "result",
    (_in_keras("train.metrics.Metrics._result", _IN_STEP),),
    "metrics of all ranks' rows",
    how="each class",
)

# --- data -----------------------------------------------------------------------------

DATASET_ITER = Patch(
    "tensorflow.data.Dataset",
    "__iter__",
    (
        _in_keras("checks.own_exchanges.OwnExchanges._iter", _EACH),
        _in_keras("data.round_robin_sharding.LoopBatches._iter", _ASYNC),
        _in_keras("data.data_service_hooks.DataServiceHooks._iter", _DATA),
        _in_keras("data.dataset_iteration.DatasetIteration._iter", _IN_STEP),
        _in_keras("data.disable_autotune._iter", _EACH),
    ),
    "division of the batches of loops, iterators that end at once",
)
DATASET_CACHE = Patch(
    "tensorflow.data.Dataset",
    "cache",
    (_in_keras("data.cache_files._cache", "ranks other than the chief"),),
    "a cache file for each rank",
)
DATASET_SNAPSHOT = Patch(
    "tensorflow.data.Dataset",
    "snapshot",
    (_in_keras("data.cache_files._snapshot", "ranks other than the chief"),),
    "a snapshot for each rank",
)
DATASET_SAVE = Patch(
    "tensorflow.data.Dataset", "save", (_SAVED,), "files written by the chief only"
)
EPOCH_ITERATOR = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "__init__",
    (
        _in_keras("data.round_robin_sharding.FitBatches._begin", _ASYNC),
        _in_keras("data.data_service_hooks.DataServiceHooks._epochs", _DATA),
    ),
    "sharded batches in fit, or batches from data tasks",
)
ONE_EPOCH_ITERATOR_RESET = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "reset",
    (_in_keras("data.round_robin_sharding._shard_epochs", _ASYNC),),
    "the number of batches of this rank",
    how="object",
)
ONE_EPOCH_ITERATOR_CLASS = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "__class__",
    (_in_keras("data.data_service_hooks._leave_uncounted", _DATA),),
    "passes of any number of batches",
    how="object",
)
ONE_EPOCH_ITERATOR_WARNING = Patch(
    "keras.src.backend.tensorflow.trainer.TFEpochIterator",
    "_interrupted_warning",
    (_in_keras("data.data_service_hooks._leave_uncounted", _DATA),),
    "end of a pass without a warning",
    how="object",
)
ONE_ITERATOR_CLASS = Patch(
    "tensorflow.data.Iterator",
    "__class__",
    (_in_keras("data.dataset_iteration._watched", _IN_STEP),),
    "detection of the end of a batch in a loop",
    how="object",
)
SET_SEED = Patch(
    "tensorflow.random",
    "set_seed",
    (_in_keras("data.per_rank_shuffle.SeedOffset._set_seed", "data: seed_offset"),),
    "a different order of the data on each rank",
)
GET_FILE = Patch(
    "keras.src.utils.file_utils",
    "get_file",
    (_in_keras("data.downloads.Downloads._get_file", "several ranks"),),
    "one download for each host",
    how="function",
)

# --- files ----------------------------------------------------------------------------

SAVE_MODEL = Patch(
    "keras.src.saving.saving_api",
    "save_model",
    (_SAVED,),
    "files written by the chief only",
    how="function",
)
SAVE_WEIGHTS = Patch(
    "keras.src.saving.saving_api",
    "save_weights",
    (_SAVED,),
    "files written by the chief only",
    how="function",
)
CHECKPOINT_WRITE = Patch(
    "tensorflow.train.Checkpoint",
    "write",
    (_SAVED, _ALL_SLOTS),
    "files written by the chief only",
)
CHECKPOINT_SAVE = Patch(
    "tensorflow.train.Checkpoint",
    "save",
    (_SAVED, _ALL_SLOTS),
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
        _in_keras("train.chief_only_saving.ChiefOnlySaving._save_of_manager", _EACH),
        _ALL_SLOTS,
    ),
    "files written by the chief only",
)
SAVED_MODEL_SAVE = Patch(
    "tensorflow.saved_model",
    "save",
    (_SAVED, _ALL_SLOTS),
    "files written by the chief only",
)
MAKEDIRS = Patch(
    "keras.src.utils.file_utils",
    "makedirs",
    (_in_keras("train.chief_only_saving._make_once", _EACH),),
    "folders created by several ranks at once",
)
PRINT_MSG = Patch(
    "keras.src.utils.io_utils",
    "print_msg",
    (_in_keras("train.chief_only_saving._say_nothing", "ranks other than the chief"),),
    "messages printed once",
)
_NO_WRITER = (
    _in_keras(
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
ONE_BACKUP_SAVE = Patch(
    "keras.callbacks.BackupAndRestore",
    "_save_model",
    (_in_keras("train.injected_callbacks.ByTheChief.__init__", _EACH),),
    "backups written by the chief only",
    how="object's dict",
)

# --- gradients and graphs -------------------------------------------------------------

TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    (
        Handler(
            "exchange.reduced_tensors.ReducedTensors.gradients", _EACH, called="after"
        ),
        _in_keras("checks.row_terms.RowTerms._before_gradient", _IN_STEP, "before"),
        _in_keras("train.tape_gradients.TapeGradients._gradient", _IN_STEP),
    ),
    "gradients from a tape over all ranks' rows",
)
TAPE_JACOBIAN = Patch(
    "tensorflow.GradientTape",
    "jacobian",
    (_in_keras("train.tape_gradients.TapeGradients._jacobian", _IN_STEP),),
    "gradients of single rows",
)
GRADIENTS = Patch(
    "tensorflow",
    "gradients",
    (_in_keras("train.tape_gradients.TapeGradients._gradients", _IN_STEP),),
    "gradients of graphs",
)
GRADIENTS_1 = Patch(
    "tensorflow.compat.v1",
    "gradients",
    (_in_keras("train.tape_gradients.TapeGradients._gradients", _IN_STEP),),
    "gradients of graphs",
)
MAP_FN = Patch(
    "tensorflow",
    "map_fn",
    (_in_keras("train.tape_gradients.TapeGradients._by_rows", _IN_STEP),),
    "gradients of single rows",
)
VECTORIZED_MAP = Patch(
    "tensorflow",
    "vectorized_map",
    (_in_keras("train.tape_gradients.TapeGradients._by_rows", _IN_STEP),),
    "gradients of single rows",
)
ONE_TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    (Handler("horovod.tape.DistributedGradientTape", _OWN, True),),
    "exchange of the gradients of one tape",
    how="object",
)
ONE_TAPE_LOCAL = Patch(
    "tensorflow.GradientTape",
    "register_local_source",
    (Handler("horovod.tape.DistributedGradientTape", _OWN, True),),
    "variables local to each rank",
    how="object",
)
FUNCTION_CALL = Patch(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function",
    "__call__",
    (
        _in_keras("train.xla_fallback.XlaFallback._call", _EACH),
        Handler("exchange.error_translation._call", "tfcluster is used", True),
    ),
    "functions without XLA, unchanged errors of an exchange",
)
SCATTER_ADD = Patch(
    "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable",
    "scatter_add",
    (Handler("parameter_server.fast_scatter._around", "ps tasks", True),),
    "fast additions to rows of a variable",
    how="for a while",
)
SCATTER_SUB = Patch(
    "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable",
    "scatter_sub",
    (Handler("parameter_server.fast_scatter._around", "ps tasks", True),),
    "fast additions to rows of a variable",
    how="for a while",
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

_GRADIENT_CLIPS = tuple(
    Patch("tensorflow", name, (_RECORD_CLIP,), "the line of a clip in a report")
    for name in ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
)
CLIP_BY_GLOBAL_NORM, CLIP_BY_NORM, CLIP_BY_VALUE = _GRADIENT_CLIPS

# --- strategies of TensorFlow's -------------------------------------------------------

_REFUSE = "checks.unsupported_strategies._refuse"


def _strategy(name: str, function: str) -> Patch:
    return Patch(
        f"tensorflow.distribute.{name}",
        "__init__",
        (_in_keras(function, _EACH),),
        "refusal of a second division of batches",
    )


STRATEGIES_OF_CLUSTERS = tuple(
    _strategy(f"{module}{name}", _REFUSE)
    for name in (
        "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    )
    for module in ("", "experimental.")
)
STRATEGIES_OF_ONE_HOST = tuple(
    _strategy(name, f"{_REFUSE}_replicas")
    for name in ("MirroredStrategy", "experimental.CentralStorageStrategy")
)

PATCHES = (
    *(each for each in list(vars().values()) if isinstance(each, Patch)),
    *DRAWS_PER_PARAMETER,
    *DRAWS_BY_PARAMETERS,
    *CATEGORICAL_DRAWS,
    *STRATEGIES_OF_CLUSTERS,
    *STRATEGIES_OF_ONE_HOST,
)
TABLE = Table(PATCHES, program_kind.distributes_itself)

if __name__ == "__main__":
    sys.stdout.write(TABLE.text())

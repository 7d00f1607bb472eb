"""Every attribute of TensorFlow 2 that the runtime replaces.

TensorFlow is not imported here. An attribute's handlers are called in the order of the
table, whether they belong to the hooks on Keras or to modules below. ``python -m
tfcluster.runtime.keras.patches`` prints this table as well.
"""

from __future__ import annotations

from tfcluster.runtime.contract import Called, Handler, Patch, Table
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


def in_keras(
    function: str, when: str, called: Called = "around", *, always: bool = False
) -> Handler:
    """A handler in ``tfcluster.runtime.keras``."""
    return Handler(f"keras.{function}", when, always, called)


def _is_in_keras(handler: Handler) -> bool:
    return handler.function.startswith("keras.")


SAVED = in_keras("train.chief_only_saving.ChiefOnlySaving._saved_as", EACH)
_PROGRAM_VARIABLES = "checks.program_variables.ProgramVariables"
_ALL_SLOTS = in_keras("strategies.ps_models.ServerModels._with_all_slots", SERVED)

# --- gradients and graphs -------------------------------------------------------------

TAPE_GRADIENT = Patch(
    "tensorflow.GradientTape",
    "gradient",
    (
        Handler(
            "exchange.reduced_tensors.ReducedTensors.gradients", EACH, called="after"
        ),
        in_keras("checks.row_terms.RowTerms._before_gradient", IN_STEP, "before"),
        in_keras(f"{_PROGRAM_VARIABLES}._before_gradient", IN_STEP, "before"),
        in_keras("train.tape_gradients.TapeGradients._gradient", IN_STEP),
        in_keras("losses.input_gradients.InputGradients._of_tape", IN_STEP),
    ),
    "gradients from a tape over all ranks' rows",
)
_PLAIN = in_keras(
    "train.matmul_gradient.MatmulGradient._plain", "collective, several ranks"
)
TAPE_JACOBIAN = Patch(
    "tensorflow.GradientTape",
    "jacobian",
    (in_keras("train.tape_gradients.TapeGradients._jacobian", IN_STEP), _PLAIN),
    "gradients of single rows",
)
TAPE_BATCH_JACOBIAN = Patch(
    "tensorflow.GradientTape",
    "batch_jacobian",
    (_PLAIN,),
    "gradients of single rows",
)
GRADIENTS = Patch(
    "tensorflow",
    "gradients",
    (
        in_keras("train.tape_gradients.TapeGradients._gradients", IN_STEP),
        in_keras("losses.input_gradients.InputGradients._of_graph", IN_STEP),
    ),
    "gradients of graphs",
)
GRADIENTS_1 = Patch(
    "tensorflow.compat.v1",
    "gradients",
    (
        in_keras("train.tape_gradients.TapeGradients._gradients", IN_STEP),
        in_keras("losses.input_gradients.InputGradients._of_graph", IN_STEP),
    ),
    "gradients of graphs",
)
CUSTOM_GRADIENT = Patch(
    "tensorflow",
    "custom_gradient",
    (in_keras("checks.backward_functions.BackwardFunctions._decorate", IN_STEP),),
    "gradients that the program changes in the backward pass",
)
MAP_FN = Patch(
    "tensorflow",
    "map_fn",
    (in_keras("train.tape_gradients.TapeGradients._by_rows", IN_STEP),),
    "gradients of single rows",
)
VECTORIZED_MAP = Patch(
    "tensorflow",
    "vectorized_map",
    (in_keras("train.tape_gradients.TapeGradients._by_rows", IN_STEP),),
    "gradients of single rows",
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
        in_keras("checks.own_row_numbers.OwnRowNumbers._call", IN_STEP),
        in_keras(f"{_PROGRAM_VARIABLES}._step", IN_STEP),
        in_keras("checks.program_arrays.ProgramArrays._function", IN_STEP),
        in_keras("inner_functions.InnerFunctions._call", IN_STEP),
        Handler("exchange.error_translation._call", "tfcluster is used", True),
    ),
    "functions without XLA, unchanged errors of an exchange, "
    "functions within functions",
)
_EAGER = "tensorflow.python.framework.ops._EagerTensorBase"
_NUMBERS = "numbers that a loop has computed from a rank's rows"
TENSOR_READS = tuple(
    Patch(
        _EAGER,
        name,
        (in_keras("checks.own_row_numbers.OwnRowNumbers._read", IN_STEP),),
        _NUMBERS,
    )
    for name in (
        "numpy",
        "__array__",
        "__bool__",
        "__float__",
        "__format__",
        "__int__",
        "__repr__",
        "__str__",
    )
)
TENSOR_ARITHMETIC = tuple(
    Patch(
        "tensorflow.Tensor",
        name,
        (in_keras("checks.own_row_numbers.OwnRowNumbers._computed", IN_STEP),),
        _NUMBERS,
    )
    for name in (
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__rtruediv__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
    )
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

GRADIENT_FUNCTIONS = Patch(
    "tensorflow.python.framework.registry.Registry",
    "lookup",
    (
        in_keras(
            "train.matmul_gradient.MatmulGradient._lookup", "collective, several ranks"
        ),
    ),
    "fast gradients of large matrices for few rows",
)
# TensorFlow replaces the methods in ResourceVariable after its definition. Variables
# that a graph creates have another class. A call that passes both is handled once.
ASSIGNMENTS = tuple(
    Patch(
        f"tensorflow.python.ops.resource_variable_ops.{kind}",
        name,
        (in_keras(f"{_PROGRAM_VARIABLES}._assign", IN_STEP),),
        "variables that a step sets from the rows of one rank",
    )
    for kind in ("BaseResourceVariable", "ResourceVariable")
    for name in ("assign", "assign_add", "assign_sub")
)
SCATTERED_ASSIGNMENTS = tuple(
    Patch(
        "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable",
        name,
        (in_keras(f"{_PROGRAM_VARIABLES}._assign", IN_STEP),),
        "variables that a step sets from the rows of one rank",
    )
    for name in (
        "_strided_slice_assign",
        "batch_scatter_update",
        "scatter_add",
        "scatter_div",
        "scatter_max",
        "scatter_min",
        "scatter_mul",
        "scatter_nd_add",
        "scatter_nd_max",
        "scatter_nd_min",
        "scatter_nd_sub",
        "scatter_nd_update",
        "scatter_sub",
        "scatter_update",
    )
)

_RECORD_CLIP = in_keras(
    "step_recorder.StepRecorder._clip", VERIFY, "before", always=True
)
_GRADIENT_CLIPS = tuple(
    Patch("tensorflow", name, (_RECORD_CLIP,), "the line of a clip in a report")
    for name in ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
)
CLIP_BY_GLOBAL_NORM, CLIP_BY_NORM, CLIP_BY_VALUE = _GRADIENT_CLIPS
COMPUTE_AVERAGE_LOSS = Patch(
    "tensorflow.nn",
    "compute_average_loss",
    (in_keras("losses.loss_rescaling.LossRescaling._average", IN_STEP),),
    "losses divided by a global batch size",
)

# --- random numbers -------------------------------------------------------------------

_DRAWS = "random.row_draws.RowDraws"


def _stateless(name: str, function: str) -> Patch:
    return Patch(
        "tensorflow.python.ops.gen_stateless_random_ops_v2",
        f"stateless_{name}",
        (in_keras(f"{_DRAWS}.{function}", IN_STEP),),
        "the random numbers of a rank's rows in the whole batch",
    )


STATELESS_UNIFORM = _stateless("random_uniform_v2", "_skipping")
STATELESS_NORMAL = _stateless("random_normal_v2", "_skipping")
STATELESS_UNIFORM_INT = _stateless("random_uniform_int_v2", "_slicing")
STATELESS_TRUNCATED_NORMAL = _stateless("truncated_normal_v2", "_slicing")


_STATES = "random.stateful_draws.StatefulDraws"


def _draw(module: str, name: str, function: str) -> Patch:
    return Patch(
        f"tensorflow.python.ops.{module}",
        name,
        (in_keras(function, IN_STEP),),
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
STATEFUL_GAMMA = _draw("gen_random_ops", "random_gamma", f"{_STATES}._gamma")
STATEFUL_POISSON = _draw("gen_random_ops", "random_poisson_v2", f"{_STATES}._poisson")
STATEFUL_CATEGORICAL = _draw("gen_random_ops", "multinomial", f"{_STATES}._categorical")
DRAWS_BY_PARAMETERS = tuple(
    _draw(module, name, f"{_DRAWS}._by_parameters")
    for module, name in (
        ("gen_stateless_random_ops", "stateless_random_binomial"),
        ("gen_stateless_random_ops", "stateless_random_poisson"),
        ("gen_stateless_random_ops_v2", "stateless_random_gamma_v3"),
    )
)
STATELESS_CATEGORICAL = _draw(
    "gen_stateless_random_ops", "stateless_multinomial", f"{_DRAWS}._categorical"
)
GENERATOR_SKIP = Patch(
    "tensorflow.random.Generator",
    "_prepare_key_counter",
    (in_keras(f"{_STATES}._generator", IN_STEP),),
    "generators advance by the numbers of the whole batch",
)
_ROW_LOOPS = "random.row_loops.RowLoops"
_DRAWS_IN_LOOPS = "a warning about draws in a loop over rows"
WHILE_LOOP = Patch(
    "tensorflow.python.ops.while_loop",
    "while_loop",
    (in_keras(f"{_ROW_LOOPS}._while", IN_STEP),),
    _DRAWS_IN_LOOPS,
)
VECTORIZED_LOOP = Patch(
    "tensorflow.python.ops.parallel_for.control_flow_ops",
    "_pfor_impl",
    (in_keras(f"{_ROW_LOOPS}._vectorized", IN_STEP),),
    _DRAWS_IN_LOOPS,
)
UNIFORM_CLASSES, LOG_UNIFORM_CLASSES, FIXED_CLASSES, LEARNED_CLASSES = (
    Patch(
        "tensorflow.python.ops.gen_candidate_sampling_ops",
        f"{name}_candidate_sampler",
        (in_keras(f"{_STATES}.{function}", IN_STEP),),
        "the same classes in losses that sample them",
    )
    for name, function in (
        ("uniform", "_uniform_classes"),
        ("log_uniform", "_log_uniform_classes"),
        ("fixed_unigram", "_fixed_classes"),
        ("learned_unigram", "_learned_classes"),
    )
)
TENSORFLOW_SHUFFLE = Patch(
    "tensorflow.python.ops.gen_random_ops",
    "random_shuffle",
    (in_keras(f"{_DRAWS}._shuffle_of_tensorflow", IN_STEP),),
    "a warning about shuffles of rows",
)
DATASET_FUNCTION = Patch(
    "tensorflow.python.data.ops.structured_function.StructuredFunctionWrapper",
    "__init__",
    (in_keras(f"{_DRAWS}._alike", IN_STEP),),
    "random numbers in functions of datasets, which get whole batches",
)

# --- data -----------------------------------------------------------------------------

DATASET_ITER = Patch(
    "tensorflow.data.Dataset",
    "__iter__",
    (
        in_keras("checks.own_exchanges.OwnExchanges._iter", EACH),
        in_keras("data.round_robin_sharding.LoopBatches._iter", ASYNC),
        in_keras("data.data_service_hooks.DataServiceHooks._iter", DATA),
        in_keras("data.dataset_iteration.DatasetIteration._iter", IN_STEP),
        in_keras("data.disable_autotune._iter", EACH),
    ),
    "division of the batches of loops, iterators that end at once",
)
ITERATOR_NEXT = tuple(
    Patch(
        "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
        name,
        (
            in_keras("data.dataset_iteration.DatasetIteration._element", IN_STEP),
            in_keras("strategies.local_sgd.LocalSgd._next", LOCAL),
        ),
        "order of batches, and of what reads a rank's share of them, in graphs",
    )
    for name in ("__next__", "get_next", "get_next_as_optional")
)
DATASET_AS_NUMPY = Patch(
    "tensorflow.data.Dataset",
    "as_numpy_iterator",
    (in_keras("data.dataset_iteration.DatasetIteration._as_numpy", IN_STEP),),
    "whole batches for loops that get arrays",
)
DATASET_CACHE = Patch(
    "tensorflow.data.Dataset",
    "cache",
    (in_keras("data.cache_files._cache", "ranks other than the chief"),),
    "a cache file for each rank",
)
DATASET_SNAPSHOT = Patch(
    "tensorflow.data.Dataset",
    "snapshot",
    (in_keras("data.cache_files._snapshot", "ranks other than the chief"),),
    "a snapshot for each rank",
)
DATASET_SAVE = Patch(
    "tensorflow.data.Dataset", "save", (SAVED,), "files written by the chief only"
)
ONE_ITERATOR_CLASS = Patch(
    "tensorflow.data.Iterator",
    "__class__",
    (in_keras("data.dataset_iteration._watched", IN_STEP),),
    "detection of the end of a batch in a loop",
    how="object",
)
SET_SEED = Patch(
    "tensorflow.random",
    "set_seed",
    (in_keras("data.per_rank_shuffle.SeedOffset._set_seed", "data: seed_offset"),),
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
    (SAVED, _ALL_SLOTS),
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
    ),
    "division of functions among the ranks",
)
FLAT_CALL = Patch(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction",
    "_call_flat",
    (Handler("partition.hook.Hook.flat_call", f"{IN_STEP}, {EXPLAIN}"),),
    "division of functions whose gradients a tape computes",
)

# --- strategies of TensorFlow's -------------------------------------------------------

_REFUSE = "checks.unsupported_strategies._refuse"


def _strategy(name: str, function: str) -> Patch:
    return Patch(
        f"tensorflow.distribute.{name}",
        "__init__",
        (in_keras(function, EACH),),
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
    *ASSIGNMENTS,
    *SCATTERED_ASSIGNMENTS,
    *ITERATOR_NEXT,
    *TENSOR_READS,
    *TENSOR_ARITHMETIC,
    *DRAWS_BY_PARAMETERS,
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

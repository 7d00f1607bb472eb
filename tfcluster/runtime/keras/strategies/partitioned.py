"""Ranks that divide every traced function: see ``tfcluster.runtime.partition``.

Numbers need no hook in Keras. What remains is what other ranks must not do again:
printing progress and writing files; and what nobody traces: eager gradients, and the
end of training.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import keras
import tensorflow as tf

from tfcluster.plan.model import Runtime
from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.rounding import Rounding
from tfcluster.runtime.collective.transports.tensorflow.transport import (
    TensorFlowTransport,
)
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.data_service_hooks import Passes
from tfcluster.runtime.keras.tf_variables import held, raw
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.divided_weights import DividedWeights
from tfcluster.runtime.keras.train.eager_gradients import EagerGradients, OptimizerSteps
from tfcluster.runtime.keras.train.partitioned_models import PartitionedModels
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import KerasVariable, Model
from tfcluster.runtime.partition import (
    input_pipelines,
    tf_datasets,
    tf_functions,
)
from tfcluster.runtime.partition.agreement import Agreement, joined
from tfcluster.runtime.partition.divided_variables import DividedVariables
from tfcluster.runtime.partition.exchange import (
    Exchanger,
    HostExchanger,
)
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.input_parts import DividedPipeline
from tfcluster.runtime.partition.op_runs import Failures, OpRuns
from tfcluster.runtime.partition.optimizer_slots import OptimizerSlots
from tfcluster.runtime.partition.own_loops import OwnLoops
from tfcluster.runtime.partition.part_iterators import DividedInputs
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.programs import RankProgram
from tfcluster.runtime.partition.row_parts import Running
from tfcluster.runtime.partition.shards import compute_alike, ranks_of, require_alike
from tfcluster.runtime.partition.variables import Watched
from tfcluster.runtime.partition.whole_work import WholeWork
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.tensor_types import Dataset
from tfcluster.runtime.tensors import name_of


def install(
    session: TrainingSession,
    options: Runtime,
    *,
    seed: int,
    strict: bool,
    is_served: bool,
    divides_loops: bool,
) -> None:
    """Install the hooks, once per process; ``seed`` is equal on all ranks.

    Batches are divided among the ranks, or into ``options.shards``, if there are any.
    ``strict`` raises what the division of a function raises, which is otherwise
    computed whole. ``is_served``: ps tasks hold the optimizers' variables, and a rank
    only has what it last read of them. ``divides_loops``: the ranks divide the input
    pipelines of the program's own loops, too, and gather the batches.
    """
    group = session.group
    count = options.shards
    whole_work = WholeWork(session.warn)
    steps = OptimizerSteps(session)
    if count is None:
        ranks = Ranks(session.group.size, (session.group.rank,))
    else:
        compute_alike(count, session.group.size)
        ranks = ranks_of(count, session.group.rank, session.group.size)
    divided = DividedVariables(ranks, group, session.warn, options.shard_tables)
    slots = OptimizerSlots(divided) if options.shard_optimizer else None
    agreement = Agreement(group, session.warn, divided.is_divided)
    group.last_state = agreement.variables.last_state
    group.last_equal = agreement.variables.last_equal
    gradients = EagerGradients(session, agreement, steps)

    def ran(program: RankProgram) -> None:
        whole_work.ran(program)
        if count is not None:
            require_alike()
        if program.is_divided:
            session.reporter.exchanged()
            gradients.of_tape |= program.is_of_tape
            if program.trains:
                gradients.divided += 1
                steps.count(program.label)

    def is_paused() -> bool:
        return (
            session.within("saving")
            or session.within("initializing")
            or program_kind.distributes_itself()
            # Each rank predicts for the rows that its program has.
            or (not session.divides and session.within("predicting"))
        )

    divided_inputs = DividedInputs()

    def is_in_step() -> bool:
        return not is_paused() and threading.current_thread() is threading.main_thread()

    def divide_input(dataset: Dataset) -> Dataset:
        (split,) = ranks.splits
        pipeline = input_pipelines.divided(dataset, split) if is_in_step() else ""
        if isinstance(pipeline, str):
            return dataset
        divided_pipeline = DividedPipeline(pipeline, split)
        return Passes(dataset, partial(divided_inputs.begin_pass, divided_pipeline))

    new_exchanger: Callable[[str], Exchanger] = partial(
        HostExchanger,
        group,
        bucket_bytes=int(options.bucket_mb * (1 << 20)),
        rounding=_rounding(options),
        feeds_back=options.error_feedback,
    )
    if count is not None:
        new_exchanger = partial(HostExchanger, group, ranks=count)
    failures = Failures(group)
    running: Running = failures.running
    if isinstance(group.transport, TensorFlowTransport):
        runs = OpRuns(group, group.transport, new_exchanger)
        new_exchanger, running = runs.exchanger, runs.running
    if options.shard_tables is not None and ranks.size > 1:
        DividedWeights(
            divided,
            undivided=partial(session.once, "initializing"),
            warn=session.warn,
        ).install()
        session.tables = divided
    hook: Hook | None = None
    if ranks.size > 1:
        contract.check([*tf_functions.NAMES, *tf_datasets.NAMES])
        hook = Hook(
            ranks,
            new_exchanger,
            seed=seed,
            strict=strict,
            agree=agreement.on,
            join=None if session.divides else partial(joined, group),
            is_paused=is_paused,
            ran=ran,
            running=running,
            together=failures.together,
            divided_inputs=divided_inputs,
            variable_names=variable_paths,
            variables=divided,
            slots=slots,
        )
        tf_patches.TABLE.install(
            {tf_patches.CALL_FUNCTION: hook.call, tf_patches.FLAT_CALL: hook.flat_call}
        )
    else:
        tf_patches.TABLE.install({tf_patches.CALL_FUNCTION: steps.after_call})
    if slots is not None:
        session.settle = lambda what: slots.make_whole()
        tf_patches.TABLE.install({tf_patches.VARIABLE_HANDLE: slots.handle})
    tf_patches.TABLE.install({tf_patches.TAPE_GRADIENT: reduced.gradients})
    eager = {
        patches.OPTIMIZER_APPLY: gradients.apply,
        patches.LOSS_SCALE_APPLY: gradients.apply,
    }
    patches.TABLE.install(eager)
    saving = ChiefOnlySaving(session)
    saving.install()

    def begin(model: Model) -> None:
        agreement.variables.renew()
        variables = variables_of(model, with_optimizer=not is_served)
        if variables:
            agreement.on("variables at the beginning of fit", (), variables)

    # With shards, a process has several ranks.
    divides_input = session.divides and ranks.size > 1 and count is None
    if divides_input and divides_loops and hook is not None:

        def is_own_loop() -> bool:
            # Not all ranks may call a callback.
            in_keras = session.inside_keras
            return is_in_step() and not in_keras and tf.executing_eagerly()

        loops = OwnLoops(
            group,
            divided_inputs,
            hook,
            agree=agreement.on,
            together=failures.together,
            is_of_program=is_own_loop,
            exchanged=session.reporter.exchanged,
        )
        tf_patches.TABLE.install(
            {
                tf_patches.DATASET_ITER: loops.iterate,
                tf_patches.TRACK: tf_datasets.track,
            }
        )
    models = PartitionedModels(
        session, saving, begin, hook, divide_input if divides_input else None
    )
    models.install()
    refuse_strategies()
    atexit.register(_end, session)


def _end(session: TrainingSession) -> None:
    """Report at the end of a program that nothing of it was divided: it is right, too.

    That cannot be said of ranks with batches of their own, and of programs that
    distribute themselves. A program that has computed nothing gets no warning.
    """
    report = session.reporter
    if not tf_internals.is_running(tf_internals.context()):
        return
    ended_early = getattr(sys, "last_value", None) is not None
    itself = program_kind.distributes_itself()
    if report.has_exchanged or ended_early or itself or not session.divides:
        return
    session.warn(
        "nothing of this program was divided: every rank computed all of it. The "
        "result is right, but no faster than on one machine. Put a step of the "
        "training into a function with @tf.function that gets a batch, of at least one "
        "row for each rank"
    )
    report.exchanged()


def _rounding(options: Runtime) -> Rounding | None:
    """How the transport rounds gradients; None if it does not, or cannot."""
    dtypes = {"fp16": "float16", "bf16": "bfloat16"}
    dtype = dtypes.get(options.compression)
    if dtype is None or options.transport not in ("auto", "host"):
        return None
    return Rounding(dtype)


def variable_paths() -> dict[int, str]:
    """The paths of all of Keras's variables, by the ``id`` of their handles."""
    # Not isinstance: it may call code of objects that stand for others.
    variables = [
        variable
        for variable in gc.get_objects()
        if issubclass(type(variable), keras.Variable)
    ]
    return {
        id(tf_functions.handle_of(own)): variable.path
        for variable in variables
        if isinstance(variable.value, tf.Variable)
        for own in held(variable.value)
    }


def variables_of(model: Model, *, with_optimizer: bool) -> list[Watched]:
    """The variables of a model and, where asked for, of its optimizer."""
    optimizer = getattr(model, "optimizer", None) if with_optimizer else None
    return watched([*model.variables, *getattr(optimizer, "variables", ())])


def watched(variables: Iterable[KerasVariable]) -> list[Watched]:
    """The variables of numbers, as the ranks compare them."""
    return [
        Watched(name, tf_functions.handle_of(own), own.dtype, 0, tuple(own.shape))
        for name, variable in ((name_of(one), raw(one)) for one in variables)
        if isinstance(variable, tf.Variable) and variable.dtype != tf.string
        for own in held(variable)
    ]


# --- strategies of TensorFlow ---------------------------------------------------------


_OF_CLUSTERS = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy", "TPUStrategy")
_OF_ONE_HOST = ("MirroredStrategy", "CentralStorageStrategy")


def refuse_strategies() -> None:
    """Let TensorFlow's strategies raise CollectiveError when they are created.

    The replicas of such a strategy would all-reduce gradients among themselves, and
    each of them with the other ranks. A strategy with one replica changes nothing.
    """
    tf_patches.TABLE.install({tf_patches.NEW_STRATEGY: _new_strategy})


def _new_strategy(
    original: Callable[[type], object],
    kind: type,
    devices: Sequence[str] | None = None,
    *_: object,
    compute_devices: Sequence[str] | None = None,
    **__: object,
) -> object:
    """A new strategy; no refused one waits for tasks at the ranks' addresses first."""
    of_clusters = _public_name(kind, _OF_CLUSTERS)
    if of_clusters:
        raise _refusal(of_clusters)
    of_one_host = _public_name(kind, _OF_ONE_HOST)
    if of_one_host:
        own = devices or compute_devices or tf.config.list_logical_devices("GPU")
        if len(own) > 1:
            raise _refusal(of_one_host)
        reporter().warning(
            f"{of_one_host} has one replica and changes nothing: tfcluster trains on "
            "all ranks already"
        )
    return original(kind)


def _public_name(kind: type, names: Sequence[str]) -> str | None:
    """The name by which TensorFlow offers a strategy, if it is among these."""
    for name in names:
        for module in (tf.distribute, tf.distribute.experimental):
            offered = getattr(module, name, None)
            if offered is not None and issubclass(kind, offered):
                return name
    return None


def _refusal(name: str) -> CollectiveError:
    return CollectiveError(
        f"the script creates a {name}, but tfcluster already trains on all ranks: "
        "remove it, or set 'runtime: {strategy: none}', which leaves the script alone"
    )

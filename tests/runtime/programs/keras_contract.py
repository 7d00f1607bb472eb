# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Checks that the installed Keras and TensorFlow are as the runtime assumes.

Covers all private names, all patched attributes, and behaviour whose change would
otherwise go unnoticed.
"""

from __future__ import annotations

import ast
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from tests.runtime.programs import checks
from tfcluster.base import versions
from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.context import context_from
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.exchange import error_translation
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.data.round_robin_sharding import yields_batches
from tfcluster.runtime.task import injection
from tfcluster.runtime.tensors import as_tensor
from tfcluster.runtime.tf1 import patches as tf1_patches

OF_TF1: tuple[contract.PrivateName | contract.Patch, ...] = (
    *tf_internals.NAMES_OF_TF1,
    *tf_internals.NAMES_OF_OPTIMIZER_1,
    *tf1_patches.PATCHES,
)
PATCHES = (*patches.PATCHES, *tf_patches.PATCHES, *tf1_patches.PATCHES)
MOST_MS = 5.0


@contextmanager
def instead(owner: Any, name: str, value: Any = None) -> Iterator[None]:
    """Replace ``owner.name`` by ``value``, or remove it if that is None."""
    before = vars(owner)[name]
    if value is None:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def refusal() -> str:
    """The error that the runtime raises before a training, if any."""
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    context = context_from(
        {
            "TF_CONFIG": json.dumps(config),
            "TFCLUSTER_STRATEGY": "collective",
            "TFCLUSTER_TOKEN": "00" * 32,
        }
    )
    try:
        injection.install(context)
    except CollectiveError as error:
        return str(error)
    raise AssertionError("nothing was missing")


# --- the names ------------------------------------------------------------------------


def check_all_names_are_there() -> None:
    internals.check()
    contract.check(OF_TF1)


def check_that_takes_milliseconds() -> None:
    took = []
    for _ in range(5):
        start = time.perf_counter()
        internals.check()
        took.append((time.perf_counter() - start) * 1000)
    assert min(took) < MOST_MS, took


def check_one_error_names_all_that_is_missing() -> None:
    optimizer = contract.defining_class(keras.optimizers.Optimizer, "_clip_gradients")
    model = contract.defining_class(keras.Model, "get_metrics_result")
    with instead(optimizer, "_clip_gradients"), instead(model, "get_metrics_result"):
        text = refusal()
    version = f"Keras {keras.__version__} is installed, 3.7 to "
    assert version in text, text
    for part in (
        "keras.optimizers.Optimizer._clip_gradients: needed for parameter servers",
        "keras.Model.get_metrics_result: needed for metrics of all ranks' rows",
        "pip install 'keras>=3.7,<3.",
        "strategy: none",
    ):
        assert part in text, text
    assert "TensorFlow 2" not in text, text
    internals.check()


def check_one_error_names_all_that_is_missing_without_hooks() -> None:
    """Programs that use only the Horovod-like API do not have Keras's hooks."""
    context = contract.resolve("tensorflow.python.eager.context.Context")
    module = contract.resolve(tf_patches.FUNCTION_CALL.target.rpartition(".")[0])
    with instead(context, "add_function_def"), instead(module, "Function"):
        try:
            error_translation.install()
        except CollectiveError as error:
            text = str(error)
        else:
            raise AssertionError("nothing was missing")
    for part in (
        f"TensorFlow {tf.__version__} is installed, 2.16 to ",
        "Context.add_function_def: needed for parameter servers",
        "Function.__call__: needed for functions without XLA",
        "pip install 'tensorflow>=2.16,<",
    ):
        assert part in text, text
    assert "Keras" not in text, text
    assert "strategy: none" not in text, text
    error_translation.install()


def check_what_needs_no_hooks_takes_milliseconds() -> None:
    took = []
    for _ in range(5):
        start = time.perf_counter()
        tf_internals.check()
        took.append((time.perf_counter() - start) * 1000)
    assert min(took) < MOST_MS / 5, took


def check_a_module_that_has_moved_is_missing() -> None:
    parent = sys.modules["keras.src.backend.tensorflow"]
    name = "keras.src.backend.tensorflow.trainer"
    found = sys.modules[name]
    sys.modules[name] = None  # type: ignore[assignment]  # so that no import finds it
    try:
        with instead(parent, "trainer"):
            text = refusal()
    finally:
        sys.modules[name] = found
    assert "TFEpochIterator: needed for sharded batches" in text, text


def check_every_accessor_is_in_the_list() -> None:
    names = [*internals.NAMES, *tf_internals.NAMES, *OF_TF1]
    known = {each.path.rpartition(".")[2] for each in names}
    known |= {patch.attribute for patch in PATCHES}
    for module in (internals, tf_internals):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name.startswith("_") and not name.startswith("__"):
                assert name in known, ast.unparse(node)


def check_the_oldest_and_newest_versions() -> None:
    for package in ("keras", "tensorflow"):
        version = versions.imported(package)
        assert not versions.too_old(package, version)


# --- the patches ----------------------------------------------------------------------


def check_every_patch_has_a_target() -> None:
    for patch in PATCHES:
        assert patch.is_there(), patch.path
        contract.resolve(patch.target)


def check_nobody_has_bound_a_patched_function_early() -> None:
    """Keras calls a patched function only through the module that is patched."""
    for patch in PATCHES:
        owner = contract.resolve(patch.target)
        if patch.how != "attribute" or not isinstance(owner, ModuleType):
            continue
        if not owner.__name__.startswith("keras"):
            continue
        own = contract.original_of(patch)
        for name, module in list(sys.modules.items()):
            if name.startswith("keras.src") and module is not owner:
                found = [key for key, value in vars(module).items() if value is own]
                assert not found, (patch.path, name, found)


def check_a_function_is_called_through_its_class() -> None:
    assert tf_patches.FUNCTION_CALL.owner() is type(tf.function(lambda: None))


def check_public_names_are_those_of_the_public_modules() -> None:
    """Other modules have the same names: tensorflow.distribute is one of them."""
    for path, found in (
        ("tensorflow.distribute.MirroredStrategy", tf.distribute.MirroredStrategy),
        ("tensorflow.compat.v1.Session", tf.compat.v1.Session),
        ("tensorflow.data.Dataset", tf.data.Dataset),
        ("tensorflow.summary.create_file_writer", tf.summary.create_file_writer),
        ("keras.optimizers.Optimizer", keras.optimizers.Optimizer),
    ):
        assert contract.resolve(path) is found, path


def check_the_methods_are_where_they_are_looked_for() -> None:
    assert patches.VARIABLE_ASSIGN.owner() in type(keras.Variable(0.0)).__mro__
    assert patches.EPOCH_ITERATOR.owner() is trainer.TFEpochIterator
    assert isinstance(vars(patches.OPTIMIZER_VARIABLES.owner())["variables"], property)


# --- changes that would go unnoticed --------------------------------------------------


def check_seeds_have_the_name_of_seeds() -> None:
    assert keras.random.SeedGenerator(1).state.name == internals.SEED_STATE


def check_datasets_are_known_by_their_classes() -> None:
    rows = tf.data.Dataset.range(8)
    batches = rows.batch(2)
    assert not yields_batches(rows)
    assert not yields_batches(batches.unbatch())
    for made in (
        batches,
        batches.apply(tf.data.experimental.assert_cardinality(4)),
        batches.cache(),
        batches.concatenate(batches),
        batches.filter(lambda x: True),
        batches.ignore_errors(),
        batches.map(lambda x: x),
        batches.map(lambda x: x, num_parallel_calls=2),
        batches.prefetch(1),
        batches.rebatch(4),
        batches.repeat(2),
        batches.shard(2, 0),
        batches.shuffle(4),
        batches.skip(1),
        batches.take(2),
        batches.take_while(lambda x: True),
        batches.with_options(tf.data.Options()),
        rows.batch(2, num_parallel_calls=2),
        rows.padded_batch(2),
        tf.data.Dataset.zip((batches, batches)),
    ):
        assert yields_batches(made), type(made).__name__
    assert tf_internals.variant_of(rows).dtype == tf.variant


def check_slots_are_named_by_paths() -> None:
    variable = keras.Variable([1.0], name="any")
    internals.set_path(variable, "tfcluster7")
    assert variable.path == "tfcluster7"
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build([variable])
    slots = [each.path for each in optimizer.variables]
    assert any("tfcluster7_momentum" in path for path in slots), slots


def check_optimizers_update_by_the_methods_that_are_looked_for() -> None:
    calls = []

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(keras.optimizers.SGD, name)(self, *args, **kwargs)

        return method

    body = {name: noting(name) for name in internals.UPDATE_METHODS}
    own = type("Own", (keras.optimizers.SGD,), body)
    assert [internals.is_of_keras(base) for base in own.__mro__[:2]] == [False, True]
    variable = keras.Variable([1.0])
    own(0.1).apply_gradients([(tf.constant([1.0]), variable)])
    assert {*calls} == {*internals.UPDATE_METHODS}, calls


def check_variables_are_spared_from_weight_decay() -> None:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    spared, decaying = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer.exclude_from_weight_decay([spared])
    optimizer.build([spared, decaying])
    assert not internals.decays(optimizer, spared.value)
    assert internals.decays(optimizer, decaying.value)
    zero = tf.constant([0.0])
    optimizer.apply([zero, zero])
    assert float(spared.numpy()[0]) == 1.0
    assert float(decaying.numpy()[0]) < 1.0


def check_optimizers_keep_what_is_asked_for() -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = keras.optimizers.SGD(rate, global_clipnorm=1.0)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    assert internals.trained_variables(optimizer)[0] is variable
    assert internals.rate_of(optimizer) is rate
    assert internals.index_of(optimizer, variable) == 0
    internals.require_known(optimizer, [variable])
    (clipped,) = internals.clipped(optimizer, [tf.constant([4.0])])
    assert float(as_tensor(clipped)[0]) == 1.0
    optimizer.apply([tf.constant([0.0])])
    assert int(internals.iterations_of(optimizer).numpy()) == 1


def check_normalization_asks_for_its_moments() -> None:
    calls = []

    class Own(keras.layers.BatchNormalization):
        def _moments(self, inputs, mask):
            calls.append(list(internals.reduction_axes(self)))
            return super()._moments(inputs, mask)

    Own()(tf.ones([4, 2]), training=True)
    assert calls == [[0]]


def check_an_epoch_has_the_batches_that_are_set() -> None:
    data = tf.data.Dataset.range(8).batch(2)
    strategy = tf.distribute.get_strategy()
    iterator = trainer.TFEpochIterator(x=data, distribute_strategy=strategy)
    assert internals.reads_dataset(iterator)
    assert internals.batches_of_data(iterator) == 4
    assert internals.steps_of(iterator) is None
    internals.set_dataset(iterator, internals.dataset_of(iterator).shard(2, 0))
    iterator.__class__ = internals.counted(trainer.TFEpochIterator, 2)
    seen = []
    for *_, batches in iterator.enumerate_epoch():
        seen.append(next(batches))
    assert np.shape(seen)[0] == 2, seen
    assert iterator.num_batches == 2
    internals.set_steps(iterator, 1)
    assert internals.steps_of(iterator) == 1
    assert len(list(iterator.enumerate_epoch())) == 1


def check_an_epoch_ends_where_its_data_ends() -> None:
    """Without a count, an epoch has all batches, also if the one before had fewer."""
    lengths = iter((2, 4))
    data = tf.data.Dataset.from_generator(
        lambda: iter(range(next(lengths))), output_signature=tf.TensorSpec([], tf.int64)
    )
    strategy = tf.distribute.get_strategy()
    iterator = trainer.TFEpochIterator(x=data.batch(1), distribute_strategy=strategy)
    iterator.__class__ = internals.counted(trainer.TFEpochIterator, None, warns=False)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            steps = iterator.enumerate_epoch()
            with iterator.catch_stop_iteration():
                seen.append(0)
                for *_, batches in steps:
                    next(batches)
                    seen[-1] += 1
    assert seen == [2, 4], seen


def check_eager_tensors_are_told_from_those_of_graphs() -> None:
    assert tf_internals.is_eager(tf.constant(1))
    assert not tf_internals.is_eager(tf.Variable(1))
    with tf.Graph().as_default():
        assert not tf_internals.is_eager(tf.constant(1))


def check_training_begins_with_the_epoch_that_is_set() -> None:
    epochs = []

    class Own(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            assert not internals.initial_epoch(self.model)
            internals.set_initial_epoch(self.model, 1)

        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    data = np.ones((2, 1), np.float32)
    model.fit(data, data, epochs=3, verbose=0, callbacks=[Own()])
    assert epochs == [1, 2]
    logs = {"loss": 3.0}
    assert float(np.ravel(internals.flat_metrics(model, logs))[0]) == 3.0


def check_callbacks_save_by_their_own_methods() -> None:
    swap = keras.callbacks.SwapEMAWeights()
    assert internals.averages_are_in_model(swap) is False


def check_functions_lose_xla() -> None:
    function = tf.function(lambda: tf.constant(1), jit_compile=True)
    assert tf_internals.is_for_xla(function)
    plain = tf_internals.without_xla(function)
    assert not tf_internals.is_for_xla(plain)
    assert int(plain()) == 1


def check_xla_is_seen_while_it_traces() -> None:
    seen = []

    @tf.function(jit_compile=True, autograph=False)
    def traced():
        seen.append(tf_internals.is_in_xla(tf.compat.v1.get_default_graph()))
        raise KeyError("seen")

    with suppress(KeyError):
        traced()
    assert seen == [True]
    assert not tf_internals.is_in_xla(tf.compat.v1.get_default_graph())


def check_errors_of_autograph_are_known() -> None:
    class Own(Exception):
        def __init__(self, one, two):
            super().__init__(one, two)

    @tf.function
    def fails():
        raise Own(1, 2)

    raised = None
    try:
        fails()
    except Exception as error:
        raised = error
    assert raised is not None
    assert tf_internals.is_of_autograph(raised), type(raised)


def check_code_of_autograph_is_known() -> None:
    def own(x):
        return x

    made = tf.autograph.to_graph(own).__code__.co_filename
    assert tf_internals.is_generated(made), made
    assert not tf_internals.is_generated(__file__)


def check_operations_are_known() -> None:
    assert tf_internals.could_record() is False
    assert tf_internals.is_running(tf_internals.context())
    assert any(frame.filename == __file__ for frame in tf_internals.user_frames())


def check_a_manager_knows_a_noted_checkpoint() -> None:
    checkpoint = tf.train.Checkpoint(x=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, "there", max_to_keep=1)
    assert tf_internals.prefix_of(manager).endswith("there/ckpt")
    tf_internals.note_checkpoint(manager, "there/ckpt-1", 1.0)
    assert manager.latest_checkpoint == "there/ckpt-1"
    assert manager.checkpoints == ["there/ckpt-1"]
    tf_internals.note_checkpoint(manager, "there/ckpt-2", 2.0)
    assert manager.checkpoints == ["there/ckpt-2"]


def check_messages_are_printed_by_one_function() -> None:
    said = []
    module = contract.resolve(patches.PRINT_MSG.target)
    with instead(module, "print_msg", lambda text, *args, **kwargs: said.append(text)):
        callback = keras.callbacks.EarlyStopping(verbose=1)
        callback.stopped_epoch = 1
        callback.on_train_end()
    assert said


began = time.perf_counter()
checks.run(globals())
sys.stderr.write(f"{time.perf_counter() - began:.2f} s\n")

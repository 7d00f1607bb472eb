"""All of Keras's non-public parts that the runtime uses.

``NAMES`` says for each name which feature needs it; other modules use only the
functions here. They neither import ``keras.src`` nor use private attributes of Keras's
objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.contract import PrivateName, names
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.types import (
    BatchNormalization,
    EpochIterator,
    KerasVariable,
    Layer,
    Logs,
    Model,
    ModelCheckpoint,
    Optimizer,
    SwapEMAWeights,
)
from tfcluster.runtime.tensor_types import (
    Dataset,
    Gradient,
    Tensor,
)
from tfcluster.runtime.tensor_types import Variable as TfVariable

_OPTIMIZER = "keras.optimizers.Optimizer"
_LAYER = "keras.Layer"
_MODEL = "keras.Model"
_BATCH_NORM = "keras.layers.BatchNormalization"
_ITERATOR = "keras.src.backend.tensorflow.trainer.TFEpochIterator"
_BASE_ITERATOR = "keras.src.trainers.epoch_iterator.EpochIterator"

_SERVERS = "parameter servers"
_SHARDED = "sharded batches"
_DATA = "data tasks"
_TABLES = "weights that are divided by rows"

NAMES = (
    # Optimizers.
    *names(
        f"{_OPTIMIZER}.__init__", "the exchange of gradients", "_trainable_variables"
    ),
    *names(f"{_OPTIMIZER}.__init__", _SERVERS, "_iterations", "_learning_rate"),
    *names(
        _OPTIMIZER,
        _SERVERS,
        *("_check_variables_are_known", "_get_variable_index", "_clip_gradients"),
    ),
    *names(f"{_OPTIMIZER}.apply", _SERVERS, "_backend_apply_gradients"),
    *names(f"{_OPTIMIZER}._backend_apply_gradients", _SERVERS, "_backend_update_step"),
    *names(_OPTIMIZER, "weight decay on ps tasks", "_use_weight_decay"),
    *names("keras.Variable.__init__", _SERVERS, "_path"),
    *names("keras.Variable.path", _SERVERS, ""),
    *names("keras.Variable", _TABLES, "_initialize"),
    *names("keras.Variable.__init__", _TABLES, "_dtype"),
    *names("keras.Variable._initialize", _TABLES, "_value"),
    # Layers and models.
    *names(_LAYER, "tfcluster verify", "_flatten_layers"),
    *names(
        "keras.random.SeedGenerator.__init__",
        "tfcluster verify",
        "seed_generator_state",
    ),
    PrivateName(
        f"{_BATCH_NORM}.call",
        "_moments",
        "SyncBatchNormalization",
        overridden_in="horovod.sync_batch_normalization",
    ),
    *names(f"{_BATCH_NORM}.build", "SyncBatchNormalization", "_reduction_axes"),
    *names(f"{_MODEL}.fit", "restored callbacks", "_initial_epoch"),
    *names(_MODEL, "train_on_batch", "_flatten_metrics_in_order"),
    # The epochs of fit.
    *names(_ITERATOR, _SHARDED, ""),
    *names(f"{_ITERATOR}.__init__", _SHARDED, "_distributed_dataset"),
    *names(f"{_ITERATOR}._get_iterator", _SHARDED, "_distributed_dataset"),
    *names(f"{_BASE_ITERATOR}.__init__", _SHARDED, "_num_batches", "steps_per_epoch"),
    # The number of batches of a data adapter.
    *names(f"{_BASE_ITERATOR}.reset", _SHARDED, "num_batches"),
    *names(f"{_BASE_ITERATOR}.__init__", _DATA, "_num_batches", "data_adapter"),
    *names(_ITERATOR, _DATA, "_interrupted_warning"),
    *names(
        "keras.src.trainers.data_adapters.tf_dataset_adapter", _DATA, "TFDatasetAdapter"
    ),
    # Callbacks and files.
    PrivateName(
        "keras.callbacks.ModelCheckpoint.on_epoch_end",
        "_save_model",
        "BestModelCheckpoint",
        overridden_in="callbacks",
    ),
    *names(
        "keras.callbacks.SwapEMAWeights.__init__", _SERVERS, "_ema_weights_in_model"
    ),
    *names("keras.src.backend.config", "downloads", "keras_home"),
    PrivateName(
        "keras.src.saving.saving_lib.H5IOStore.__init__",
        "_h5_entry_group",
        _TABLES,
        optional=True,
    ),
)

SEED_STATE = "seed_generator_state"
"""The name of a seed generator's variable, and the end of its path."""

UPDATE_METHODS = (
    "apply",
    "apply_gradients",
    "_clip_gradients",
    "_backend_apply_gradients",
    "_backend_update_step",
)
"""Methods that see all gradients; a class that overrides one may need all at once."""


def check() -> None:
    """Raise one CollectiveError that names all that Keras and TensorFlow lack."""
    contract.check([*NAMES, *tf_internals.NAMES, *patches.PATCHES, *tf_patches.PATCHES])


# --- optimizers -----------------------------------------------------------------------


def trained_variables(optimizer: Optimizer) -> list[KerasVariable]:
    """The variables that an optimizer was built for, in its order."""
    return list(optimizer._trainable_variables)


def iterations_of(optimizer: Optimizer) -> KerasVariable:
    """The variable that counts gradients, including accumulated ones."""
    return optimizer._iterations


def rate_of(optimizer: Optimizer) -> Any:
    """The learning rate as given: a variable, a schedule or a function."""
    return optimizer._learning_rate


def require_known(optimizer: Optimizer, variables: Sequence[KerasVariable]) -> None:
    """Raise Keras's ValueError if the optimizer was not built for ``variables``."""
    optimizer._check_variables_are_known(variables)


def index_of(optimizer: Optimizer, variable: KerasVariable) -> int:
    """The index of a variable among those that the optimizer was built for.

    Raises KeyError for another variable.
    """
    return optimizer._get_variable_index(variable)


def clipped(optimizer: Optimizer, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients, clipped according to the optimizer's settings.

    Tensors, IndexedSlices or None; shapes and dtypes stay.
    """
    return optimizer._clip_gradients(gradients)


def decays(optimizer: Optimizer, variable: KerasVariable | TfVariable) -> bool:
    """Whether the optimizer applies weight decay to a variable."""
    return optimizer._use_weight_decay(variable)


def set_path(variable: KerasVariable, path: str) -> None:
    """Set a variable's path, from which optimizers derive the names of its slots."""
    variable._path = path


def is_of_keras(written: object) -> bool:
    """Whether a class or function is one of Keras's own, not of the program."""
    module = getattr(written, "__module__", None)
    return str(module).partition(".")[0] == "keras"


# --- layers and models ----------------------------------------------------------------


def layers_of(layer: Layer) -> Iterator[Layer]:
    """A layer and all layers within it."""
    return layer._flatten_layers()


def moments(
    layer: BatchNormalization, inputs: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mean and variance as ``BatchNormalization`` itself computes them.

    Both have shape (channels,) and the dtype of ``inputs``. ``mask`` has the inputs'
    shape without the last dimension.
    """
    return layer._moments(inputs, mask)


def reduction_axes(layer: BatchNormalization) -> Sequence[int]:
    """The axes that a ``BatchNormalization`` reduces."""
    return layer._reduction_axes


def initial_epoch(model: Model) -> int | None:
    """The first epoch of ``fit`` if a callback has set one, else None."""
    return model._initial_epoch


def set_initial_epoch(model: Model, epoch: int | None) -> None:
    """Set the first epoch of ``fit``; None means the epoch given as its argument."""
    model._initial_epoch = epoch


def flat_metrics(model: Model, logs: Logs) -> list[float] | float:
    """The logs as ``train_on_batch`` returns them: a list or one number."""
    return model._flatten_metrics_in_order(logs)


# --- the epochs of fit ----------------------------------------------------------------


def dataset_of(iterator: EpochIterator) -> Dataset:
    """The dataset over which ``fit`` iterates."""
    return iterator._distributed_dataset


def set_dataset(iterator: EpochIterator, dataset: Dataset) -> None:
    """Make ``fit`` iterate over another dataset."""
    iterator._distributed_dataset = dataset


def steps_of(iterator: EpochIterator) -> int | None:
    """The batches per epoch that the program requested from ``fit``; None for all."""
    return iterator.steps_per_epoch


def set_steps(iterator: EpochIterator, count: int) -> None:
    """Set the number of batches per epoch that ``fit`` is asked to use."""
    iterator.steps_per_epoch = count


def batches_of_data(iterator: EpochIterator) -> int | None:
    """The number of batches in the data that ``fit`` was given; None if unknown."""
    return iterator.data_adapter.num_batches


def counted(
    kind: type[EpochIterator], count: int | None, *, warns: bool = True
) -> type[EpochIterator]:
    """A subclass whose objects always have ``count`` batches; None means unknown.

    Unless ``warns``, they do not warn that the data has run out.
    """
    always = property(lambda iterator: count, lambda iterator, count: None)
    changed: dict[str, object] = {"_num_batches": always}
    if not warns:
        changed["_interrupted_warning"] = lambda iterator: None
    return type(kind.__name__, (kind,), changed)


def reads_dataset(iterator: EpochIterator) -> bool:
    """Whether the program has given ``fit`` a ``tf.data.Dataset``."""
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    return isinstance(iterator.data_adapter, TFDatasetAdapter)


# --- callbacks and files --------------------------------------------------------------


def averages_are_in_model(callback: SwapEMAWeights) -> bool:
    """Whether the weights are currently swapped with their averages."""
    return callback._ema_weights_in_model


def save_checkpoint(
    callback: ModelCheckpoint, epoch: int, batch: int | None, logs: Logs | None
) -> None:
    """Save as the ``ModelCheckpoint`` itself would."""
    callback._save_model(epoch, batch, logs)


def keras_home() -> str:
    """The folder to which Keras downloads."""
    from keras.src.backend import config

    return str(config.keras_home())


def dtype_of(variable: Any) -> str:
    """The dtype of a ``keras.Variable`` as it is stored, whatever it is cast to."""
    return variable._dtype


def group_of(store: Any) -> Any:
    """The ``h5py.Group`` into which a ``H5IOStore`` writes the entries of an object."""
    return store._h5_entry_group


def initialize(variable: Any, value: Tensor) -> Any:
    """Give a new ``keras.Variable`` its first value; returns its ``tf.Variable``."""
    variable._initialize(value)
    return variable._value

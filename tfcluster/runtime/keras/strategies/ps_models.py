"""The models that the ps tasks keep for this process, one per optimizer.

A model is opened with the first gradient. From then on, the ps tasks hold the valid
values of its variables; the chief passes on values that the program assigns.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.strategies.optimizer_replica import (
    described,
    packer,
    traits_of,
    unique,
)
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import (
    KerasVariable,
    Optimizer,
    SwapEMAWeights,
)
from tfcluster.runtime.parameter_server.client import (
    OpenResult,
    ParameterServerClient,
    Rows,
)
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tensors import array_of, tensor_of_part

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class ServerModel:
    """One optimizer's variables, as the ps tasks keep them."""

    key: str
    """Its name on the ps tasks: the optimizer's name, with a number if it repeats."""
    optimizer: weakref.ref[Optimizer]
    variables: list[KerasVariable]
    rows_only: bool
    """Whether only the changed rows come back for sparse gradients."""
    begun_elsewhere: bool = False
    """Whether the ps tasks already had trained weights; then a gradient of our own
    initial values must be discarded."""
    changed: dict[str, KerasVariable] = field(default_factory=dict)
    """Variables by path whose assigned values the ps tasks do not have yet."""
    rate_path: str = ""
    """The path of the learning rate, once it is known."""
    stale: bool = True
    """Whether the optimizer's slots have changed on the ps tasks since they were last
    fetched."""
    shown: dict[str, tuple[KerasVariable, Array]] = field(default_factory=dict)
    """Variables by path, each with the value that the program could last see.

    Checkpoints and callbacks set variables without Keras's ``assign``, so the variables
    are compared with these values before the next push.
    """

    def set(self, values: Sequence[Array | Rows | None]) -> None:
        """Assign values from the ps tasks, one per variable; None means unchanged."""
        for variable, value in zip(self.variables, values, strict=True):
            if isinstance(value, Rows):
                slices = tf.IndexedSlices(value.values, value.indices)
                raw(variable).scatter_update(slices)
            elif value is not None:
                raw(variable).assign(tensor_of_part(value))


class ServerModels:
    """Opens models on the ps tasks, refreshes them, and passes on assignments.

    The assignments of the chief are passed on to the ps tasks.
    """

    def __init__(
        self,
        session: TrainingSession,
        servers: Callable[[], ParameterServerClient],
        *,
        synchronous: bool,
    ) -> None:
        self._session = session
        self._connect = servers
        self.synchronous = synchronous
        self._models: list[ServerModel] = []
        self._watched: dict[
            int, tuple[ServerModel, str, weakref.ref[KerasVariable]]
        ] = {}
        self._in_graphs: dict[int, tuple[weakref.ref[KerasVariable], Array | None]] = {}
        """Variables, by ``id``, that graphs assign to; each with the memory that it had
        when that was last looked at."""
        self._lock = threading.Lock()

    @property
    def servers(self) -> ParameterServerClient:
        """The client of the ps tasks; the first access connects to them."""
        return self._connect()

    def install(self) -> None:
        """Watch for the program's assignments and for reads of optimizer slots."""
        patches.TABLE.install(
            {
                patches.VARIABLE_ASSIGN: self._assign,
                patches.OPTIMIZER_FINALIZE: self._finalize,
                patches.OPTIMIZER_VARIABLES: self._variables,
                patches.SWAP_EMA: self._swap,
            },
            HandlerPlace.SERVICE,
        )
        tf_patches.TABLE.install(
            dict.fromkeys(
                (
                    tf_patches.CHECKPOINT_WRITE,
                    tf_patches.CHECKPOINT_SAVE,
                    tf_patches.CHECKPOINT_READ,
                    tf_patches.CHECKPOINT_RESTORE,
                    tf_patches.MANAGER_SAVE,
                    tf_patches.SAVED_MODEL_SAVE,
                ),
                self._with_all_slots,
            ),
            HandlerPlace.SERVICE,
        )

    def clips_here(self, optimizer: Optimizer) -> bool:
        """Whether ranks clip their own gradients, because these are never averaged.

        Accumulated gradients are clipped on the ps tasks, after the accumulation.
        """
        return not self.synchronous and not optimizer.gradient_accumulation_steps

    def of(self, optimizer: Optimizer, kinds: str) -> ServerModel:
        """The model of ``optimizer``; opens it if necessary.

        ``kinds`` are the kinds of the expected gradients: see ``client.Pack``. Raises
        CollectiveMismatchError if the ranks' variables or options differ.
        """
        for model in self._existing():
            if model.optimizer() is optimizer:
                return model
        in_step = tf.executing_eagerly()
        with SIGNALS.elsewhere(), self._lock, tf.init_scope():
            model, others = self._open(optimizer, kinds)
        # A step that is being traced will read the current values when it runs.
        model.begun_elsewhere = others and in_step and not self.synchronous
        return model

    def _open(self, optimizer: Optimizer, kinds: str) -> tuple[ServerModel, bool]:
        key = self._session.optimizer_names.of(optimizer)
        variables = internals.trained_variables(optimizer)
        clips_here = self.clips_here(optimizer)
        traits = traits_of(optimizer, clips_here=clips_here)
        values = [np.asarray(variable.numpy()) for variable in variables]
        opened = self.servers.open(
            key,
            described(variables, rows_only=traits.rows_only),
            values,
            kinds,
            packer(optimizer, clips_here=clips_here),
            synchronous=self.synchronous,
            splittable=traits.splittable,
            together=traits.together,
        )
        model = ServerModel(key, weakref.ref(optimizer), variables, traits.rows_only)
        model.set(opened.values)
        self._models.append(model)
        self._watch(model, variables)
        self._watch(model, optimizer.variables)
        return model, _are_others(opened, values)

    # --- to the ps tasks ------------------------------------------------------------

    def pushing(
        self,
        model: ServerModel,
        looked_at: Sequence[str] = (),
        values: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Before a push, pass on all changes that the program made to this model.

        The caller has looked at the variables of the paths ``looked_at`` itself, and
        gives new ``values`` for some.
        """
        self._look_at_assigned_in_graphs(model)
        for path, (variable, before) in model.shown.items():
            if not np.array_equal(raw(variable).numpy(), before, equal_nan=True):
                model.changed[path] = variable
        model.shown.clear()
        for path in looked_at:
            model.changed.pop(path, None)
        if self._session.chief:
            for path, value in values.items():
                self.servers.assign(model.key, path, value)
        self.pass_on_assignments(model)
        model.stale = True

    def rate_path(self, model: ServerModel) -> str:
        """The path of the learning rate, which is a variable of the optimizer."""
        if not model.rate_path and (optimizer := model.optimizer()) is not None:
            with self._session.once("slots"):
                own = optimizer.variables
            rate = internals.rate_of(optimizer)
            by_path = zip(unique(own), own, strict=True)
            model.rate_path = next(
                path for path, variable in by_path if variable is rate
            )
        return model.rate_path

    def pass_on_assignments(self, model: ServerModel) -> None:
        """Pass on the values that the program has assigned since the last call."""
        while model.changed:
            path, variable = model.changed.popitem()
            if self._session.chief:
                value = np.asarray(raw(variable).numpy())
                with contextlib.suppress(KeyError):  # if the variable is only local
                    self.servers.assign(model.key, path, value)

    def settle(self, what: str) -> None:
        """Pass on assignments, and fetch the latest weights."""
        self.pass_on_all_assignments()
        self.pull()

    def pass_on_all_assignments(self) -> None:
        """Call ``pass_on_assignments`` for all models."""
        for model in self._models:
            self.pass_on_assignments(model)

    def _watch(self, model: ServerModel, variables: Sequence[KerasVariable]) -> None:
        for path, variable in zip(unique(variables), variables, strict=True):
            self._watched[id(variable)] = model, path, weakref.ref(variable)
            if id(variable) in self._in_graphs:
                self._in_graphs[id(variable)] = (
                    weakref.ref(variable),
                    memory_of(variable),
                )

    def _look_at_assigned_in_graphs(self, model: ServerModel) -> None:
        for key, (ref, memory) in list(self._in_graphs.items()):
            variable = ref()
            if variable is None:
                del self._in_graphs[key]
                continue
            owner, path, _ = self._watched.get(key, (None, "", None))
            if owner is not model:
                continue
            now = memory_of(variable)
            if memory is None or not _is_unchanged(variable, now, memory):
                model.changed[path] = variable
            trained = any(variable is one for one in model.variables)
            # Memory that is referred to is copied before rows are set in it.
            self._in_graphs[key] = ref, None if trained else now

    def _note_in_graph(self, variable: KerasVariable) -> None:
        """Note that a graph that is being traced assigns to a variable."""
        if id(variable) not in self._in_graphs:
            watched = id(variable) in self._watched
            memory = memory_of(variable) if watched else None
            self._in_graphs[id(variable)] = weakref.ref(variable), memory

    def _assign(
        self,
        original: Callable[[KerasVariable, Tensor], _R],
        variable: KerasVariable,
        value: Tensor,
    ) -> _R:
        result = original(variable, value)
        if self.synchronous and tf.inside_function():
            if not self._session.within("apply"):
                self._note_in_graph(variable)
            return result
        watched = self._watched.get(id(variable))
        if watched and watched[2]() is variable and not self._session.within("apply"):
            model, path, _ = watched
            if tf.inside_function():
                self._session.warn(
                    f"{path} is assigned to inside a tf.function: the parameter "
                    "servers, which hold it, do not see the assignment (a constraint "
                    "of the layer is applied there)"
                )
            else:
                model.changed[path] = variable
        return result

    # --- from the ps tasks ----------------------------------------------------------

    def pull(self) -> None:
        """Fetch the newest weights of all models.

        Values that the program has just assigned are kept: the chief passes them on,
        perhaps later.
        """
        for model in self._existing():
            if self._session.chief:
                self.pass_on_assignments(model)
            if not model.changed:
                model.set(self.servers.pull(model.key))

    def _existing(self) -> list[ServerModel]:
        """The models whose optimizers still exist; forgets the other models."""
        self._models = [m for m in self._models if m.optimizer() is not None]
        self._watched = {
            key: entry
            for key, entry in self._watched.items()
            if entry[0].optimizer() is not None
        }
        return self._models

    def pull_slots(self, optimizer: Optimizer) -> None:
        """Fetch the optimizer's slots from the ps tasks.

        Synchronous ranks fetch only after a push: until this rank's next gradient
        nothing changes the slots there, and the program's changes here must be kept.
        """
        own = [model for model in self._models if model.optimizer() is optimizer]
        for model in own:
            if self.synchronous and not model.stale:
                continue
            with self._session.once("slots"):
                variables = optimizer.variables
            self._pull_slots(model, variables)

    def _pull_slots(self, model: ServerModel, own: Sequence[KerasVariable]) -> None:
        self.pass_on_assignments(model)
        slots = self.servers.slots(model.key)
        named = list(zip(unique(own), own, strict=True))
        for path, variable in named:
            if path in slots:
                value = slots[path]
                raw(variable).assign(np.reshape(value, variable.shape))
        model.stale = False
        if self.synchronous:
            named += zip(unique(model.variables), model.variables, strict=True)
            model.shown = {
                path: (variable, np.array(raw(variable).numpy()))
                for path, variable in named
            }

    def _variables(
        self, original: Callable[[Optimizer], _R], optimizer: Optimizer
    ) -> _R:
        """Fetch the slots before the program, or code that saves for it, reads them."""
        session = self._session
        ours = session.within("apply") or session.within("slots")
        if not ours and not tf.inside_function():
            self.pull_slots(optimizer)
        return original(optimizer)

    def _swap(
        self, original: Callable[[SwapEMAWeights], _R], callback: SwapEMAWeights
    ) -> _R:
        """Fetch the moving averages before they are swapped with the weights."""
        optimizer = callback.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        swaps_in = not internals.averages_are_in_model(callback)
        for member in getattr(optimizer, "optimizers", [optimizer]):
            if swaps_in:
                self.pull_slots(member)
        result = original(callback)
        if not swaps_in and not self.synchronous:
            # Other ranks have continued to train meanwhile.
            self.pull()
        return result

    def _finalize(
        self,
        original: Callable[Concatenate[Optimizer, _P], _R],
        optimizer: Optimizer,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        """Fetch the moving averages before they replace the weights."""
        if not optimizer.use_ema:
            return original(optimizer, *args, **kwargs)
        self.pull_slots(optimizer)
        result = original(optimizer, *args, **kwargs)
        for model in self._models:
            if model.optimizer() is optimizer:
                paths = unique(model.variables)
                model.changed |= dict(zip(paths, model.variables, strict=True))
        return result

    def _with_all_slots(
        self, original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        for model in self._models:
            if (optimizer := model.optimizer()) is not None:
                self.pull_slots(optimizer)
        return original(*args, **kwargs)


def is_same_memory(one: Array, other: Array) -> bool:
    """Whether two arrays are views of the same memory; scalars are compared."""
    if not one.size or not one.ndim:
        return one.shape == other.shape and bool(np.array_equal(one, other))
    return one.ctypes.data == other.ctypes.data and one.shape == other.shape


def _is_unchanged(variable: KerasVariable, now: Array, before: Array) -> bool:
    """Whether a variable has not been assigned to."""
    if is_same_memory(now, before):
        return True
    on_host = "CPU" in raw(variable).device
    return not on_host and now.tobytes() == before.tobytes()


def memory_of(variable: KerasVariable) -> Array:
    """A variable's value, in its own memory if that is on the host."""
    with tf.init_scope():
        return array_of(raw(variable).read_value())


def _are_others(opened: OpenResult, values: Sequence[Array]) -> bool:
    """Whether the values on the ps tasks differ from this task's initial ones."""
    return not opened.defined and not all(
        np.array_equal(theirs, ours)
        for theirs, ours in zip(opened.values, values, strict=True)
    )

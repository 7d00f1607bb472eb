"""The models that the ps tasks keep for this process, one per optimizer.

A model is opened with the first gradient. From then on the ps tasks' values of its
variables are the valid ones; the chief passes on values that the program assigns.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies.optimizer_replica import (
    described,
    packer,
    traits_of,
)
from tfcluster.runtime.keras.strategies.optimizer_slots import unique
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.parameter_server.client import (
    OpenResult,
    ParameterServerClient,
    Rows,
)
from tfcluster.runtime.parameter_server.update_graph import tensor_of


@dataclass
class ServerModel:
    """One optimizer's variables, as the ps tasks keep them."""

    key: str
    optimizer: weakref.ref[Any]
    variables: list[Variable]
    rows_only: bool
    """Whether only the changed rows come back for sparse gradients."""
    begun_elsewhere: bool = False
    """The ps tasks had trained weights already; a gradient of our own initial values
    must be discarded."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Variables by path whose assigned values the ps tasks do not have yet."""
    stale: bool = True
    """Whether the optimizer's slots have changed on the ps tasks since they were last
    fetched."""
    shown: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Variables by path, each with the value that the program could last see.

    Checkpoints and callbacks set variables without Keras's ``assign``, so the variables
    are compared with these values before the next push.
    """

    def set(self, values: Sequence[Any]) -> None:
        """Assign values from the ps tasks; None means unchanged."""
        for variable, value in zip(self.variables, values, strict=True):
            if isinstance(value, Rows):
                slices = tf.IndexedSlices(value.values, value.indices)
                raw(variable).scatter_update(slices)
            elif value is not None:
                raw(variable).assign(tensor_of(value))


class ServerModels:
    """Opens models on the ps tasks, refreshes them, and passes on assignments.

    ``leads``: the assignments of this task are passed on to the ps tasks.
    """

    def __init__(
        self,
        session: Session,
        servers: Callable[[], ParameterServerClient],
        *,
        synchronous: bool,
        leads: bool,
    ) -> None:
        self._session = session
        self._connect = servers
        self.synchronous = synchronous
        self._leads = leads
        self._masters: list[ServerModel] = []
        self._names: Counter[str] = Counter()
        self._watched: dict[int, tuple[ServerModel, str, weakref.ref[Any]]] = {}
        self._lock = threading.Lock()

    @property
    def servers(self) -> ParameterServerClient:
        return self._connect()

    def install(self) -> None:
        """Watch for the program's assignments and for reads of optimizer slots."""
        patches.TABLE.install(
            {
                patches.VARIABLE_ASSIGN: self._assign,
                patches.OPTIMIZER_SAVE: self._with_slots,
                patches.OPTIMIZER_FINALIZE: self._finalize,
                patches.OPTIMIZER_VARIABLES: self._variables,
                patches.SWAP_EMA: self._swap,
                patches.CHECKPOINT_WRITE: self._with_all_slots,
                patches.CHECKPOINT_SAVE: self._with_all_slots,
                patches.CHECKPOINT_READ: self._with_all_slots,
                patches.CHECKPOINT_RESTORE: self._with_all_slots,
                patches.MANAGER_SAVE: self._with_all_slots,
                patches.SAVED_MODEL_SAVE: self._with_all_slots,
            }
        )

    def clips_here(self, optimizer: Optimizer) -> bool:
        """Whether ranks clip their own gradients: they do if these are never averaged.

        Accumulated gradients are clipped on the ps tasks, after the accumulation.
        """
        return not self.synchronous and not optimizer.gradient_accumulation_steps

    def of(self, optimizer: Optimizer, kinds: str) -> ServerModel:
        """The model of ``optimizer``; opens it if necessary."""
        for master in self._living():
            if master.optimizer() is optimizer:
                return master
        in_step = tf.executing_eagerly()
        with self._lock, tf.init_scope():
            master, others = self._open(optimizer, kinds)
        # A step that is only being traced will run with the right values.
        master.begun_elsewhere = others and in_step
        return master

    def _open(self, optimizer: Optimizer, kinds: str) -> tuple[ServerModel, bool]:
        self._names[optimizer.name] += 1
        number = self._names[optimizer.name]
        key = optimizer.name if number == 1 else f"{optimizer.name}#{number}"
        variables = internals.trained_variables(optimizer)
        clips_here = self.clips_here(optimizer)
        traits = traits_of(optimizer, clips_here=clips_here)
        values = [np.asarray(variable.numpy()) for variable in variables]
        opened = self.servers.open(
            key,
            described(variables, rows_only=traits.rows_only),
            values,
            kinds,
            packer(optimizer, self._tracing, clips_here=clips_here),
            synchronous=self.synchronous,
            splittable=traits.splittable,
            together=traits.together,
        )
        master = ServerModel(key, weakref.ref(optimizer), variables, traits.rows_only)
        master.set(opened.values)
        self._masters.append(master)
        self._watch(master, variables)
        self._watch(master, optimizer.variables)
        return master, _are_others(opened, values)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """In this context Keras applies a replica's gradients; nothing is pushed."""
        with self._session.once("apply"):
            yield

    # --- to the ps tasks ------------------------------------------------------------

    def pushing(self, master: ServerModel) -> None:
        """Before a push: pass on all changes of the program to this model."""
        for path, (variable, before) in master.shown.items():
            if not np.array_equal(raw(variable).numpy(), before, equal_nan=True):
                master.changed[path] = variable
        master.shown.clear()
        self.tell(master)
        master.stale = True

    def tell(self, master: ServerModel) -> None:
        """Pass on what the program has assigned since the last time."""
        while master.changed:
            path, variable = master.changed.popitem()
            if self._leads:
                value = np.asarray(raw(variable).numpy())
                with contextlib.suppress(KeyError):  # for a variable that is only here
                    self.servers.assign(master.key, path, value)

    def tell_all(self) -> None:
        """``tell`` for all models."""
        for master in self._masters:
            self.tell(master)

    def _watch(self, master: ServerModel, variables: Sequence[Variable]) -> None:
        for path, variable in zip(unique(variables), variables, strict=True):
            self._watched[id(variable)] = master, path, weakref.ref(variable)

    def _assign(
        self, original: Callable[..., Any], variable: Variable, value: Any
    ) -> Any:
        result = original(variable, value)
        watched = self._watched.get(id(variable))
        if watched and watched[2]() is variable and not self._session.within("apply"):
            master, path, _ = watched
            if tf.inside_function():
                self._session.warn(
                    f"{path} is assigned to inside a tf.function: the parameter "
                    "servers, which hold it, do not see the assignment (a constraint "
                    "of the layer is applied there)"
                )
            else:
                master.changed[path] = variable
        return result

    # --- from the ps tasks ----------------------------------------------------------

    def pull(self) -> None:
        """Fetch the newest weights of all models.

        Values that the program has just assigned are kept: the chief passes them on,
        but perhaps later.
        """
        for master in self._living():
            if self._leads:
                self.tell(master)
            if not master.changed:
                master.set(self.servers.pull(master.key))

    def _living(self) -> list[ServerModel]:
        """The models whose optimizers still exist; forgets the others."""
        self._masters = [m for m in self._masters if m.optimizer() is not None]
        self._watched = {
            key: found
            for key, found in self._watched.items()
            if found[0].optimizer() is not None
        }
        return self._masters

    def optimizers(self) -> list[tuple[str, Any]]:
        """The optimizers with their models' keys; None for those that are gone."""
        return [(master.key, master.optimizer()) for master in self._masters]

    def pull_slots(self, optimizer: Optimizer) -> None:
        """Fetch the optimizer's slots from the ps tasks.

        Synchronous ranks fetch only after a push: until this rank's next gradient
        nothing changes the slots there, and the program's changes here must be kept.
        """
        own = [master for master in self._masters if master.optimizer() is optimizer]
        for master in own:
            if self.synchronous and not master.stale:
                continue
            with self._session.once("slots"):
                variables = optimizer.variables
            self._pull_slots(master, variables)

    def _pull_slots(self, master: ServerModel, own: Sequence[Any]) -> None:
        self.tell(master)
        found = self.servers.slots(master.key)
        named = list(zip(unique(own), own, strict=True))
        for path, variable in named:
            if path in found:
                value = found[path]
                raw(variable).assign(np.reshape(value, variable.shape))
        master.stale = False
        if self.synchronous:
            named += zip(unique(master.variables), master.variables, strict=True)
            master.shown = {
                path: (variable, np.array(raw(variable).numpy()))
                for path, variable in named
            }

    def _variables(self, original: Callable[..., Any], optimizer: Optimizer) -> Any:
        """Fetch the slots before the program, or code that saves for it, reads them."""
        if self._may_look() and not self._session.within("slots"):
            self.pull_slots(optimizer)
        return original(optimizer)

    def _may_look(self) -> bool:
        return not self._session.within("apply") and not tf.inside_function()

    def _with_slots(
        self, original: Callable[..., Any], optimizer: Optimizer, *args: Any
    ) -> Any:
        if self._may_look():
            self.pull_slots(optimizer)
        return original(optimizer, *args)

    def _swap(self, original: Callable[..., Any], callback: Any) -> Any:
        """Fetch the moving averages before they are swapped with the weights."""
        optimizer = callback.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        swaps_in = not internals.averages_are_in_model(callback)
        for each in getattr(optimizer, "optimizers", [optimizer]):
            if swaps_in:
                self.pull_slots(each)
        result = original(callback)
        if not swaps_in and not self.synchronous:
            # Other ranks have trained on meanwhile.
            self.pull()
        return result

    def _finalize(
        self, original: Callable[..., Any], optimizer: Optimizer, *args: Any
    ) -> Any:
        """Fetch the moving averages before they replace the weights."""
        if not optimizer.use_ema:
            return original(optimizer, *args)
        self.pull_slots(optimizer)
        result = original(optimizer, *args)
        for master in self._masters:
            if master.optimizer() is optimizer:
                paths = unique(master.variables)
                master.changed |= dict(zip(paths, master.variables, strict=True))
        return result

    def _with_all_slots(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        for master in self._masters:
            if (optimizer := master.optimizer()) is not None:
                self.pull_slots(optimizer)
        return original(*args, **kwargs)


def _are_others(opened: OpenResult, values: Sequence[Any]) -> bool:
    """Whether the ps tasks have other values than this task's initial ones."""
    return not opened.defined and not all(
        np.array_equal(theirs, ours)
        for theirs, ours in zip(opened.values, values, strict=True)
    )

"""The models that the ps tasks keep for this process: one for each optimizer.

A master copy is opened with the first gradient. From then on the ps tasks say what its
variables are; what the program assigns to them itself, the chief passes on.
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

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies.optimizer_replica import (
    described,
    packer,
    traits_of,
)
from tfcluster.runtime.keras.strategies.optimizer_slots import unique
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.parameter_server.client import (
    OpenResult,
    ParameterServerClient,
    Rows,
)
from tfcluster.runtime.parameter_server.update_graph import tensor_of
from tfcluster.runtime.patching import defining_class, wrap
from tfcluster.runtime.scripts import self_distributed


@dataclass
class ServerModel:
    """One optimizer's variables, as the ps tasks keep them."""

    key: str
    optimizer: weakref.ref[Any]
    variables: list[Any]
    rows_only: bool
    """Of sparse gradients only rows come back."""
    begun_elsewhere: bool = False
    """Others had trained before us: a gradient on our own first values is no good."""
    changed: dict[str, Any] = field(default_factory=dict)
    """What the program has assigned to, by path, and the ps tasks don't know yet."""
    stale: bool = True
    """The optimizer's own variables have changed on the ps tasks since the last time
    that they were fetched."""
    shown: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Variables by path, each with the value that the program could see of it last.

    Checkpoints and callbacks set variables without Keras, so they are compared before
    the next gradient.
    """

    def set(self, values: Sequence[Any]) -> None:
        """Take over what the ps tasks have; None: nothing new."""
        for variable, value in zip(self.variables, values, strict=True):
            if isinstance(value, Rows):
                slices = tf.IndexedSlices(value.values, value.indices)
                raw(variable).scatter_update(slices)
            elif value is not None:
                raw(variable).assign(tensor_of(value))


class ServerModels:
    """Opens, refreshes, and tells the ps tasks what the program has assigned.

    ``leads``: this task's own assignments count for all.
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
        """Watch what the program assigns, and who wants to see an optimizer's slots."""
        wrap(defining_class(keras.Variable, "assign"), "assign", self._assign)
        optimizers = keras.optimizers.Optimizer
        wrap(optimizers, "save_own_variables", self._with_slots)
        wrap(optimizers, "finalize_variable_values", self._finalize)
        _wrap_property(defining_class(optimizers, "variables"), self._variables)
        if hasattr(keras.callbacks, "SwapEMAWeights"):
            wrap(keras.callbacks.SwapEMAWeights, "_swap_variables", self._swap)
        for owner, name in (
            (tf.train.Checkpoint, "write"),
            (tf.train.Checkpoint, "save"),
            (tf.train.Checkpoint, "read"),
            (tf.train.Checkpoint, "restore"),
            (tf.train.CheckpointManager, "save"),
            (tf.saved_model, "save"),
        ):
            wrap(owner, name, self._with_all_slots)

    def clips_here(self, optimizer: Any) -> bool:
        """Whether each task clips its own gradients: where they are never averaged.

        What is accumulated first is clipped where that is done.
        """
        return not self.synchronous and not optimizer.gradient_accumulation_steps

    def of(self, optimizer: Any, kinds: str) -> ServerModel:
        """The master copy for ``optimizer``, opened where it is not yet."""
        for master in self._living():
            if master.optimizer() is optimizer:
                return master
        in_step = tf.executing_eagerly()
        with self._lock, tf.init_scope():
            master, others = self._open(optimizer, kinds)
        # A step that is only traced now will run with the right values.
        master.begun_elsewhere = others and in_step
        return master

    def _open(self, optimizer: Any, kinds: str) -> tuple[ServerModel, bool]:
        self._names[optimizer.name] += 1
        number = self._names[optimizer.name]
        key = optimizer.name if number == 1 else f"{optimizer.name}#{number}"
        variables = list(optimizer._trainable_variables)
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
        """A shadow's gradients are applied by Keras, not pushed again."""
        with self._session.once("apply"):
            yield

    # --- to the ps tasks ------------------------------------------------------------

    def pushing(self, master: ServerModel) -> None:
        """A gradient is about to be pushed: all that it meets there is as here."""
        for path, (variable, before) in master.shown.items():
            if not np.array_equal(raw(variable).numpy(), before, equal_nan=True):
                master.changed[path] = variable
        master.shown.clear()
        self.tell(master)
        master.stale = True

    def tell(self, master: ServerModel) -> None:
        """Pass on what the program has assigned to since the last time."""
        while master.changed:
            path, variable = master.changed.popitem()
            if self._leads:
                value = np.asarray(raw(variable).numpy())
                with contextlib.suppress(KeyError):  # one that is kept here only
                    self.servers.assign(master.key, path, value)

    def tell_all(self) -> None:
        for master in self._masters:
            self.tell(master)

    def _watch(self, master: ServerModel, variables: Sequence[Any]) -> None:
        for path, variable in zip(unique(variables), variables, strict=True):
            self._watched[id(variable)] = master, path, weakref.ref(variable)

    def _assign(self, original: Callable[..., Any], variable: Any, value: Any) -> Any:
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
        """Have the newest weights of all models.

        What the program itself has assigned just now stays: the chief passes it on, but
        maybe later.
        """
        for master in self._living():
            if self._leads:
                self.tell(master)
            if not master.changed:
                master.set(self.servers.pull(master.key))

    def _living(self) -> list[ServerModel]:
        """Forget the models whose optimizers are no more."""
        self._masters = [m for m in self._masters if m.optimizer() is not None]
        self._watched = {
            key: found
            for key, found in self._watched.items()
            if found[0].optimizer() is not None
        }
        return self._masters

    def optimizers(self) -> list[tuple[str, Any]]:
        """With their keys; None for those that are gone."""
        return [(master.key, master.optimizer()) for master in self._masters]

    def pull_slots(self, optimizer: Any) -> None:
        """Have the optimizer's own variables as they are where it is applied.

        In step nobody changes them there until this rank's next gradient, and what the
        program makes of them meanwhile is to stay.
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

    def _variables(self, original: Callable[..., Any], optimizer: Any) -> Any:
        """The program, or who saves for it, may look at what an optimizer has."""
        if self._may_look() and not self._session.within("slots"):
            self.pull_slots(optimizer)
        return original(optimizer)

    def _may_look(self) -> bool:
        return not self._session.within("apply") and not tf.inside_function()

    def _with_slots(
        self, original: Callable[..., Any], optimizer: Any, *args: Any
    ) -> Any:
        if self._may_look():
            self.pull_slots(optimizer)
        return original(optimizer, *args)

    def _swap(self, original: Callable[..., Any], callback: Any) -> Any:
        """Weights and their averages change places, and back again."""
        optimizer = callback.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        swaps_in = not callback._ema_weights_in_model
        for each in getattr(optimizer, "optimizers", [optimizer]):
            if swaps_in:
                self.pull_slots(each)
        result = original(callback)
        if not swaps_in and not self.synchronous:
            # Others have gone on training meanwhile.
            self.pull()
        return result

    def _finalize(
        self, original: Callable[..., Any], optimizer: Any, *args: Any
    ) -> Any:
        """Weights may be replaced by their averages, which the ps tasks have."""
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


def _wrap_property(owner: Any, around: Callable[..., Any]) -> None:
    """Have reading ``owner.variables`` call ``around(getter, self)``."""
    getter = vars(owner)["variables"].fget

    def get(self: Any) -> Any:
        return getter(self) if self_distributed.claimed() else around(getter, self)

    owner.variables = property(get)


def _are_others(opened: OpenResult, values: Sequence[Any]) -> bool:
    """Whether the ps tasks have other values than this task has begun with."""
    return not opened.defined and not all(
        np.array_equal(theirs, ours)
        for theirs, ours in zip(opened.values, values, strict=True)
    )

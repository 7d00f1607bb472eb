"""Exchanges gradients where a tape returns them, before the program can change them.

A program that clips gradients by their norm, adds noise, or accumulates the gradients
of several batches needs the gradients of the whole batch, not this rank's. So
``tape.gradient`` itself returns the average over the ranks, for sources that are
trainable variables. The program's changes to the average are then the same on all
ranks, and the optimizer does not exchange it again.

Some gradients stay local and are exchanged at the optimizer: gradients of Keras's own
``train_step``, which are known to arrive there unchanged; gradients that another tape
records, because their own gradient is exchanged; and gradients of single rows
(``tf.map_fn``, ``tape.jacobian``).
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck, Watch
from tfcluster.runtime.keras.checks.own_row_numbers import OwnRowNumbers
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import BY_ROWS, Session
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.train.gradient_allreduce import Target, exchange
from tfcluster.runtime.keras.types import Optimizer, Tape, Variable
from tfcluster.runtime.keras.unique_names import UniqueNames
from tfcluster.runtime.tensor_types import (
    Gradient,
    IndexedSlices,
    Leaf,
    Nest,
    Tensor,
)
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import is_sparse, name_of

_MANY_CALLS = 3
"""Warn at this many calls per step; two gradients of the same weights are common."""

_ADVICE = (
    "Call optimizer.build(variables) before the training loop, compute the gradient "
    "with tf.GradientTape and outside of other tapes, or have the optimizer do it "
    "(clipnorm, global_clipnorm, clipvalue)"
)


@dataclass(slots=True)
class _Origin:
    """The origin of a variable's last gradient."""

    gradient: weakref.ref[Gradient] | None
    """The gradient that the tape returned to the program; None if it was None."""
    graph: int | None
    """The id of the graph in which it was returned; None if it was returned eagerly."""
    exchanged: bool
    by_rows: bool
    draws: int
    """The value of ``Session.draws`` at that time."""


class TapeGradients:
    """The hooks on ``GradientTape``, and the handling of its gradients at ``apply``.

    Without ``averages_state`` the variables that layers update are left alone.
    ``divergence_check`` compares the ranks whenever a tape's gradients are exchanged.
    """

    def __init__(
        self,
        session: Session,
        *,
        averages_state: bool = True,
        divergence_check: DivergenceCheck | None = None,
    ) -> None:
        self._session = session
        self.own_numbers = OwnRowNumbers(session)
        self._divergence_check = divergence_check
        self._averages_state = averages_state
        self._names = session.optimizer_names
        self._origins = ObjectMap[_Origin]()
        self._owners = ObjectMap[weakref.ref[Optimizer]]()
        """The optimizer that applies the gradients of a variable."""
        self._groups = ObjectMap[tuple[str, set[str]]]()
        """Names of groups, by their first variable; see ``_group``."""
        self._group_names = UniqueNames()
        self._calls: dict[int, int] = {}
        self._answers = ObjectMap[dict[tuple[str, tuple[int, ...]], bool]]()
        """Results of ``_are_registered`` by first variable, then line and variables."""
        self._unowned: dict[int, str] = {}
        """The lines of gradients that no optimizer has applied, by variable."""
        self._state_of: Callable[[list[Variable]], list[Variable]] = lambda _: []

    def install(self, state_of: Callable[[list[Variable]], list[Variable]]) -> None:
        """Install the hooks.

        ``state_of`` makes variables equal on all ranks and returns their layers' state.
        """
        self._state_of = state_of
        self.own_numbers.install()
        patches.TABLE.install({patches.OPTIMIZER_BUILD: self._build})
        tf_patches.TABLE.install(
            {
                tf_patches.TAPE_GRADIENT: self._gradient,
                tf_patches.TAPE_JACOBIAN: self._jacobian,
                tf_patches.GRADIENTS: self._gradients,
                tf_patches.GRADIENTS_1: self._gradients,
                tf_patches.MAP_FN: self._by_rows,
                tf_patches.VECTORIZED_MAP: self._by_rows,
            }
        )

    # --- at the tape ----------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _gradient(
        self,
        original: Callable[..., Nest],
        tape: Tape,
        target: Nest,
        sources: Nest,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        result = original(tape, target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        places = [i for i, source in enumerate(flat) if self._is_trained(source)]
        if not places or self._session.within("apply"):
            return result
        self.own_numbers.differentiated(target)
        variables = [flat[i] for i in places]
        found = tf.nest.flatten(result)
        gradients = [found[i] for i in places]
        registered = self._are_registered(variables)
        self._note_unowned(variables, gradients)
        if not registered or self._stay_local(gradients):
            self._remember(variables, gradients, exchanged=False)
            return result
        averaged = self._exchanged(variables, gradients)
        self._remember(variables, averaged, exchanged=True)
        for place, gradient in zip(places, averaged, strict=True):
            found[place] = gradient
        return tf.nest.pack_sequence_as(sources, found)

    def _note_unowned(
        self, variables: Sequence[Variable], gradients: Sequence[Gradient]
    ) -> None:
        """Record the variables whose gradient no optimizer has applied yet."""
        session = self._session
        if (
            session.size == 1
            or not session.divides
            or session.within(BY_ROWS)
            or (session.share is None and not session.loop.divided)
            or (session.share is not None and session.share.alone)
        ):
            return
        for variable, gradient in zip(variables, gradients, strict=True):
            key = id(raw(variable))
            # Look up the line once, because an eager loop calls this in every step.
            if (
                gradient is None
                or key in self._unowned
                or self._is_registered(variable)
            ):
                continue
            if not self._unowned:
                atexit.register(self._warn_of_unowned)
            self._unowned[key] = f"{user_line()}: {name_of(variable)}"

    def _warn_of_unowned(self) -> None:
        """Warn about gradients that no optimizer applied, at the program's end."""
        if self._unowned:
            self._session.warn(
                "gradients of variables that no optimizer applies are computed from "
                f"each rank's own rows: {'; '.join(self._unowned.values())}. If the "
                "program sets the variable with such a gradient, its values differ "
                "from rank to rank, and from those of one machine. Apply the gradient "
                "with a Keras optimizer, or average it (tfc.allreduce)"
            )

    def _gradients(
        self,
        original: Callable[..., Nest],
        ys: Nest,
        xs: Nest,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        """``tf.gradients``: the result is exchanged at the optimizer.

        Some programs differentiate the result, and TensorFlow cannot differentiate the
        exchange.
        """
        result = original(ys, xs, *args, **kwargs)
        pairs = zip(tf.nest.flatten(xs), tf.nest.flatten(result), strict=True)
        trained = [(one, gradient) for one, gradient in pairs if self._is_trained(one)]
        if trained and not self._session.within("apply"):
            variables, gradients = zip(*trained, strict=True)
            self._remember(variables, gradients, exchanged=False)
        return result

    def _jacobian(
        self,
        original: Callable[..., Nest],
        tape: Tape,
        target: Nest,
        sources: Nest,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        with self._session.once(BY_ROWS):
            variables = [s for s in tf.nest.flatten(sources) if self._is_trained(s)]
            self._remember(variables, [None] * len(variables), exchanged=False)
            return original(tape, target, sources, *args, **kwargs)

    def _by_rows(
        self, original: Callable[..., Nest], *args: Any, **kwargs: Any
    ) -> Nest:
        with self._session.once(BY_ROWS):
            return original(*args, **kwargs)

    def _build(
        self,
        original: Callable[..., object],
        optimizer: Optimizer,
        variables: Sequence[Variable],
    ) -> object:
        self.owns(optimizer, variables)
        return original(optimizer, variables)

    def owns(self, optimizer: Optimizer, variables: Sequence[Variable]) -> None:
        """Record that ``optimizer`` applies the gradients of ``variables``."""
        for variable in variables:
            self._owners[raw(variable)] = weakref.ref(optimizer)
            self._unowned.pop(id(raw(variable)), None)

    def _is_trained(self, source: Leaf) -> bool:
        return isinstance(source, keras.Variable | tf.Variable) and source.trainable

    def _are_registered(self, variables: Sequence[Variable]) -> bool:
        """Whether all are registered; all traces of a line get the first one's answer.

        A rank may trace a function when another does not (a trial has more rows), and
        after the optimizer has been built. Yet all must exchange at the same places.
        """
        found = all(map(self._is_registered, variables))
        if tf.executing_eagerly() or self._session.share is not None:
            return found
        ids = tuple(id(raw(variable)) for variable in variables)
        answers = self._answers.of(raw(variables[0]), dict)
        return answers.setdefault((user_line(), ids), found)

    def _is_registered(self, variable: Variable) -> bool:
        """Whether a variable is certainly a weight; some variables contain inputs."""
        return isinstance(variable, keras.Variable) or variable in self._owners

    def _stay_local(self, gradients: Sequence[Gradient]) -> bool:
        session = self._session
        share = session.share
        if share is not None and (share.alone or session.plain_step):
            return True
        if session.within(BY_ROWS):
            return True
        tensors = [_tensor_of(g) for g in gradients if g is not None]
        if tensors and not tf_internals.should_record_backprop(tensors):
            return False
        if tensors and session.divides and session.size > 1:
            session.differs(
                "a gradient of weights is differentiated again: within that loss each "
                "rank uses the gradient of its own rows, so the result differs from "
                "that of one machine if the loss needs the gradient of the batch"
            )
        return True

    def _exchanged(
        self, variables: list[Variable], gradients: Sequence[Gradient]
    ) -> list[Gradient]:
        target, state, watch = self._prepared(variables, gradients)
        return exchange(self._session, target, gradients, variables, state, watch)

    def _prepared(
        self, variables: list[Variable], gradients: Sequence[Gradient]
    ) -> tuple[Target, list[Variable], Watch | None]:
        """The arguments of a gradient exchange: see ``gradient_allreduce.exchange``."""
        key, names = self._group(variables)
        # The number of gradients of these variables that were computed since the last
        # one was applied. For example, a step that computes two is still one step.
        first = id(raw(variables[0]))
        number = self._calls[first] = self._calls.get(first, 0) + 1

        def name() -> str:
            return self._name(variables) or key

        target = Target(name, f"{key} ({number})", names)
        state = self._state_of(variables)
        if not self._averages_state:
            state = []
        pairs = zip(variables, gradients, strict=True)
        trained = [variable for variable, gradient in pairs if gradient is not None]
        return target, state, self._watch(key, variables, trained)

    def _watch(
        self, key: str, variables: list[Variable], trained: list[Variable]
    ) -> Watch | None:
        """The watch that compares what the ranks train, if there is one.

        ``trained`` are the variables that have a gradient.
        """
        if self._divergence_check is None:
            return None
        refs = [weakref.ref(raw(variable)) for variable in variables]

        def owner() -> tuple[str, Optimizer] | None:
            """The one optimizer that applies the gradients of all variables."""
            found = {self._owner(ref()) for ref in refs}
            optimizer = found.pop() if len(found) == 1 else None
            return None if optimizer is None else (self._names.of(optimizer), optimizer)

        return self._divergence_check.watch(owner, key, trained)

    def _owner(self, variable: Variable | TfVariable | None) -> Optimizer | None:
        """The optimizer that applies the gradients of ``variable``, if known."""
        found = None if variable is None else self._owners.get(raw(variable))
        return None if found is None else found()

    def _name(self, variables: Sequence[Variable]) -> str:
        """The names of the optimizers known to apply gradients of ``variables``."""
        names: dict[str, None] = {}
        for variable in variables:
            optimizer = self._owner(variable)
            if optimizer is not None:
                names[self._names.of(optimizer)] = None
        return ", ".join(names)

    def _group(self, variables: Sequence[Variable]) -> tuple[str, set[str]]:
        """A unique name for ``variables``, equal on all ranks.

        Also returns the names that their gradients have had.
        """
        first = raw(variables[0])
        known = self._groups.get(first)
        if known is None:
            more = f" and {len(variables) - 1} more" if len(variables) > 1 else ""
            name = self._group_names.new(f"{name_of(variables[0])}{more}")
            known = self._groups[first] = name, set()
        return known

    def _remember(
        self,
        variables: Sequence[Variable],
        gradients: Sequence[Gradient],
        *,
        exchanged: bool,
    ) -> None:
        graph = _graph()
        for variable, gradient in zip(variables, gradients, strict=True):
            self._origins[raw(variable)] = _Origin(
                None if gradient is None else weakref.ref(gradient),
                graph,
                exchanged,
                self._session.within(BY_ROWS),
                self._session.draws,
            )
            shape = tuple(variable.shape)
            if exchanged and None not in shape:
                self._session.unapplied[id(raw(variable))] = shape

    # --- at the optimizer -----------------------------------------------------------

    def still_to_exchange(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> list[bool]:
        """Whether each gradient is still this rank's own, so that it must be exchanged.

        ``gradients`` are tensors, IndexedSlices or None, one for each of ``variables``.
        Raises CollectiveError if the program has changed such a gradient.
        """
        own = []
        self._warn_of_gradients_by_row(optimizer, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            self._calls.pop(id(raw(variable)), None)
            self._session.unapplied.pop(id(raw(variable)), None)
            origin = self._origins.get(raw(variable))
            if origin is None or not origin.exchanged:
                own.append(True)
                if gradient is not None and origin is not None:
                    self._refuse_changed(optimizer, gradient, variable, origin)
            else:
                own.append(False)
        return own

    def _warn_of_gradients_by_row(
        self, optimizer: Optimizer, variables: Sequence[Variable]
    ) -> None:
        calls = max((self._calls.get(id(raw(v)), 0) for v in variables), default=0)
        session = self._session
        rows = session.loop.present_rows() if session.share is None else None
        if calls < _MANY_CALLS or calls != rows:
            return
        session.warn(
            f"one step computes {calls} gradients for {self._names.of(optimizer)}, as "
            "many as this rank has rows. If each is the gradient of one row and is "
            "changed (clipped by its norm), the result differs from that of one "
            "machine: each is averaged over the ranks first. Use tape.jacobian, which "
            "leaves the gradients of rows to this rank"
        )

    def drawn_since(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> bool:
        """Whether random numbers that differ by rank may have changed gradients."""
        for gradient, variable in zip(gradients, variables, strict=True):
            origin = self._origins.get(raw(variable))
            if (
                gradient is not None
                and origin is not None
                and origin.exchanged
                and origin.draws != self._session.draws
                and not _is(origin.gradient, gradient)
            ):
                return True
        return False

    def _refuse_changed(
        self,
        optimizer: Optimizer,
        gradient: Gradient,
        variable: Variable,
        origin: _Origin,
    ) -> None:
        session = self._session
        # Keras's own step passes gradients on unchanged, if necessary through tf.cond.
        if origin.by_rows or session.plain_step or _is(origin.gradient, gradient):
            return
        in_loop = tf.executing_eagerly() and session.share is None
        if in_loop and not session.loop.divided:
            return  # All ranks have the same gradient.
        name, path = self._names.of(optimizer), name_of(variable)
        if origin.graph != _graph():
            session.warn(
                f"the gradient of {path} reaches {name} through a tf.function. If the "
                "program changes it before (clips it by its norm, adds noise), each "
                "rank changes its own, and the result differs from that of one "
                f"machine. {_ADVICE}"
            )
            return
        session.refuse(
            f"the program changes the gradient of {path} before {name} applies it. "
            "Each rank would change its own, which is not what one machine does. "
            f"{_ADVICE}"
        )


def _is(reference: weakref.ref[Any] | None, gradient: Gradient) -> bool:
    return reference is not None and reference() is gradient


def _graph() -> int | None:
    return None if tf.executing_eagerly() else id(tf.compat.v1.get_default_graph())


def _tensor_of(gradient: Tensor | IndexedSlices) -> Tensor:
    return gradient.values if is_sparse(gradient) else gradient

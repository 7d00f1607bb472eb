"""Ranks that divide every traced function: see ``tfcluster.runtime.partition``.

Numbers need no hook in Keras. What remains is what other ranks must not do again:
printing progress and writing files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tfcluster.runtime import tf_patches
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.fit_position import FitPosition
from tfcluster.runtime.keras.train.injected_callbacks import (
    changed_callbacks,
    for_evaluation,
    with_chief_only_files,
)
from tfcluster.runtime.keras.types import Callback, Model
from tfcluster.runtime.partition.agreement import Agreement
from tfcluster.runtime.partition.exchange import HostExchanger
from tfcluster.runtime.partition.explain import mostly_whole
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.programs import Program
from tfcluster.runtime.telemetry.tracer import KERAS, span


def install(session: Session, *, seed: int, strict: bool) -> Hook:
    """Install the hooks, once per process; ``seed`` is equal on all ranks.

    ``strict`` raises what the division of a function raises, which is otherwise
    computed whole.
    """
    group = session.group

    whole_work = WholeWork(session.warn)

    def ran(program: Program) -> None:
        whole_work.ran(program)
        if program.is_divided:
            session.exchanged()
            if program.trains:
                session.applies += 1
                session.step_rate.applied(program.label)

    hook = Hook(
        Ranks(session.size, (session.rank,)),
        lambda label: HostExchanger(group, label),
        seed=seed,
        strict=strict,
        agree=Agreement(group, session.warn).on,
        is_paused=lambda: session.within("saving"),
        ran=ran,
    )
    tf_patches.TABLE.install(
        {tf_patches.CALL_FUNCTION: hook.call, tf_patches.FLAT_CALL: hook.flat_call}
    )
    install_models(session)
    return hook


def install_models(session: Session) -> None:
    """Install the hooks in Keras, once per process."""
    saving = ChiefOnlySaving(session)
    saving.install()
    PartitionedModels(session, saving).install()


class WholeWork:
    """Warns once of each function whose work is mostly computed by every rank."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._undivided: set[str] = set()
        self._judged: set[str] = set()

    def ran(self, program: Program) -> None:
        """Called after each program."""
        if program.label in self._judged:
            return
        # The first batch that a loop takes is computed whole, and tells its size.
        if not program.is_divided and program.function not in self._undivided:
            self._undivided.add(program.function)
            return
        self._judged.add(program.label)
        sentence = mostly_whole([program])
        if sentence is not None:
            self._warn(sentence)


class PartitionedModels:
    """The hooks on the methods of a model that print or take callbacks."""

    def __init__(self, session: Session, files: ChiefOnlySaving) -> None:
        self._session = session
        self._files = files

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._evaluate,
                patches.MODEL_PREDICT: self._predict,
            }
        )

    def _fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        arguments = bound.arguments

        def change(callbacks: Any) -> list[Callback]:
            ours = with_chief_only_files(callbacks, self._session, self._files)
            return [*ours, FitPosition(self._session.reporter)]

        self._print_on_the_chief(arguments)
        tracer = self._session.group.tracer
        with (
            changed_callbacks(arguments.get("callbacks"), model, change) as changed,
            translated(),
            self._session.entering(),
            span(tracer, KERAS, f"fit of {model.name}") if tracer else nullcontext(),
            self._session.reporter.keeping_position(),
        ):
            arguments["callbacks"] = changed
            return original(*bound.args, **bound.kwargs)

    def _evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        if not self._session.inside_keras:
            callbacks = bound.arguments.get("callbacks")
            bound.arguments["callbacks"] = for_evaluation(callbacks, self._session)
            self._print_on_the_chief(bound.arguments)
        with translated(), self._session.entering():
            return original(*bound.args, **bound.kwargs)

    def _predict(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        return self._evaluate(original, model, *args, **kwargs)

    def _print_on_the_chief(self, arguments: dict[str, Any]) -> None:
        """Let only the chief print the progress of a call."""
        if not self._session.chief:
            arguments["verbose"] = 0

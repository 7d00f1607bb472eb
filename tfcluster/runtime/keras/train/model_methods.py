"""The hooks on ``fit``, ``evaluate`` and the other entry points of a Keras model.

They are the same for all strategies. A ``TrainingPolicy`` adds what is different.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.checks.endless_epochs import warn_of_endless_epochs
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.unsupported_strategies import refuse_replicas
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.fit_position import FitPosition
from tfcluster.runtime.keras.train.injected_callbacks import changed_callbacks
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import Callback, CallbackList, Layer, Model
from tfcluster.runtime.telemetry.tracer import KERAS, span
from tfcluster.runtime.tensor_types import Array, Nest


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of one of Keras's methods by the program."""

    method: Callable[..., object]
    """Keras's own method."""
    model: Model
    bound: inspect.BoundArguments

    @classmethod
    def of(
        cls,
        method: Callable[..., object],
        model: Model,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> MethodCall:
        """The call with these arguments. Raises TypeError if they do not fit."""
        bound = inspect.signature(method).bind(model, *args, **kwargs)
        return cls(method, model, bound)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name. Changes take effect when the method runs."""
        return self.bound.arguments

    def run(self) -> Any:
        """Call Keras's method; returns what it returns, raises what it raises."""
        return self.method(*self.bound.args, **self.bound.kwargs)


class TrainingPolicy(Protocol):
    """The behaviour that a strategy adds to the methods of a model.

    Methods with ``call`` run within ``session.entering()``.
    """

    def check_layers(self, model: Model) -> None:
        """Raise CollectiveError if the strategy cannot train or evaluate a layer."""
        ...

    def prepare(self, model: Model) -> None:
        """Prepare ``model`` before any of its methods runs."""
        ...

    def callbacks_of_fit(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """The program's callbacks and the runtime's callbacks."""
        ...

    def callbacks_of_evaluation(self, callbacks: Nest) -> CallbackList | list[Callback]:
        """The argument ``callbacks`` of an ``evaluate`` that the program calls."""
        ...

    def fitting(self) -> AbstractContextManager[None]:
        """A context in which Keras's ``fit`` runs."""
        ...

    def evaluating(
        self, model: Model, *, outermost: bool
    ) -> AbstractContextManager[None]:
        """A context in which Keras's ``evaluate`` runs.

        ``outermost`` is true if the program calls ``evaluate``. Otherwise ``fit`` calls
        it for validation.
        """
        ...

    def train_on_batch(self, call: MethodCall) -> object:
        """Run ``train_on_batch``; return what the program gets."""
        ...

    def test_on_batch(self, call: MethodCall) -> object:
        """Run ``test_on_batch``; return what the program gets."""
        ...

    def before_get_weights(self, layer: Layer) -> None:
        """Prepare for the program to read the weights of a layer or model."""
        ...


class ModelMethods:
    """Wraps the methods of Keras's trainer that programs call."""

    def __init__(
        self, session: Session, policy: TrainingPolicy, shape_errors: ShapeErrors
    ) -> None:
        self._session = session
        self._policy = policy
        self._shape_errors = shape_errors

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._evaluate,
                patches.MODEL_PREDICT: self._predict,
                patches.MODEL_TRAIN_ON_BATCH: self._train_on_batch,
                patches.MODEL_TEST_ON_BATCH: self._test_on_batch,
                patches.MODEL_PREDICT_ON_BATCH: self._predict,
                patches.LAYER_GET_WEIGHTS: self._get_weights,
            }
        )

    def _fit(
        self, original: Callable[..., object], model: Model, *args: Any, **kwargs: Any
    ) -> object:
        call = MethodCall.of(original, model, args, kwargs)
        callbacks = call.arguments.get("callbacks")

        def change(callbacks: Sequence[Callback]) -> list[Callback]:
            ours = self._policy.callbacks_of_fit(callbacks)
            return [*ours, FitPosition(self._session.reporter)]

        self._print_on_the_chief(call)
        warn_of_endless_epochs(self._session, call.arguments)
        self._policy.check_layers(model)
        with (
            changed_callbacks(callbacks, model, change) as changed,
            self._entering(model, "fit"),
            self._policy.fitting(),
            self._session.reporter.keeping_position(),
        ):
            call.arguments["callbacks"] = changed
            return call.run()

    def _evaluate(
        self, original: Callable[..., object], model: Model, *args: Any, **kwargs: Any
    ) -> object:
        outermost = not self._session.inside_keras
        call = MethodCall.of(original, model, args, kwargs)
        if outermost:
            callbacks = call.arguments.get("callbacks")
            call.arguments["callbacks"] = self._policy.callbacks_of_evaluation(
                callbacks
            )
            self._print_on_the_chief(call)
        self._policy.check_layers(model)
        with (
            self._entering(model, "evaluate"),
            self._policy.evaluating(model, outermost=outermost),
        ):
            return call.run()

    def _predict(
        self, original: Callable[..., object], model: Model, *args: Any, **kwargs: Any
    ) -> object:
        with self._entering(model, "predict"):
            return original(model, *args, **kwargs)

    def _train_on_batch(
        self, original: Callable[..., object], model: Model, *args: Any, **kwargs: Any
    ) -> object:
        call = MethodCall.of(original, model, args, kwargs)
        self._policy.check_layers(model)
        with self._entering(model):
            return self._policy.train_on_batch(call)

    def _test_on_batch(
        self, original: Callable[..., object], model: Model, *args: Any, **kwargs: Any
    ) -> object:
        call = MethodCall.of(original, model, args, kwargs)
        self._policy.check_layers(model)
        with self._entering(model):
            return self._policy.test_on_batch(call)

    def _get_weights(
        self, original: Callable[[Layer], list[Array]], layer: Layer
    ) -> list[Array]:
        self._policy.before_get_weights(layer)
        return original(layer)

    @contextmanager
    def _entering(self, model: Model, what: str = "") -> Iterator[None]:
        """Enter the session; ``what`` names the method, and is empty for one step."""
        refuse_replicas(model.distribute_strategy)
        self._policy.prepare(model)
        if without_xla(model):
            self._session.warn(
                f"{model.name} runs without XLA, as with compile(jit_compile=False), "
                "because XLA cannot compile an exchange between ranks. Keras would use "
                "it here: jit_compile is True, or 'auto' on a GPU. With XLA, layers "
                "such as Dropout draw other random numbers"
            )
        name = f"{what} of {model.name}"
        with (
            translated(),
            self._shape_errors.in_fit(),
            self._session.entering(),
            span(self._session.group.tracer, KERAS, name) if what else nullcontext(),
        ):
            yield

    def _print_on_the_chief(self, call: MethodCall) -> None:
        """Let only the chief print the progress of ``call``."""
        if not self._session.chief:
            call.arguments["verbose"] = 0

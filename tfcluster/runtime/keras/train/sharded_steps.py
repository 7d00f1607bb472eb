"""Give a model's ``train_step`` and ``test_step`` this rank's rows of every batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.batches.batch_slicing import Part, has_rows, take_part
from tfcluster.runtime.keras.checks.add_loss_check import AddLossCheck
from tfcluster.runtime.keras.checks.input_consistency import InputConsistency
from tfcluster.runtime.keras.checks.own_row_numbers import OwnRowNumbers
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.checks.traced_draws import TracedDraws
from tfcluster.runtime.keras.checks.trial_steps import TrialSteps, has_own_step
from tfcluster.runtime.keras.metrics.metrics import Metrics
from tfcluster.runtime.keras.session import Session, Share
from tfcluster.runtime.keras.types import Logs, Model
from tfcluster.runtime.tensor_types import Nest, Tensor

Step = Callable[[Nest], Logs]
"""``train_step`` or ``test_step`` of a model: its argument is a batch."""

_STEPS = (patches.ONE_MODEL_TRAIN_STEP, patches.ONE_MODEL_TEST_STEP)
_MARK = "divides_batches"


@dataclass(frozen=True, slots=True)
class StepChecks:
    """The checks before a training batch is divided and after each step."""

    input_consistency: InputConsistency
    add_loss_check: AddLossCheck
    trial_steps: TrialSteps
    row_terms: RowTerms
    metrics: Metrics
    traced_draws: TracedDraws
    own_numbers: OwnRowNumbers | None = None
    """Set if the ranks exchange their gradients in every step."""

    @contextmanager
    def eagerly(self, model: Model, step: Step, data: Nest) -> Iterator[None]:
        """Surrounds an eager step of the program's own code, with this rank's rows."""
        name = getattr(step, "__name__", "the step")
        self.row_terms.begin_batch(data, f"{name} of {model.name} {id(model)}")
        if self.own_numbers is None:
            yield
            return
        with self.own_numbers.following(data, f"{name} of {model.name}"):
            yield


def divide_steps(session: Session, model: Model, checks: StepChecks) -> None:
    """Wrap ``train_step`` and ``test_step`` of this instance, each at most once.

    The attributes of the class are unchanged. So overridden steps are wrapped too.
    """
    for patch in _STEPS:
        name = patch.attribute
        step = getattr(model, name)
        if not hasattr(step, _MARK):
            trains = name == "train_step"
            divided = _divided(session, model, step, checks, trains=trains)
            patches.TABLE.replace(patch, model, divided)


def _divided(
    session: Session,
    model: Model,
    step: Step,
    checks: StepChecks,
    *,
    trains: bool,
) -> Step:
    @functools.wraps(step)
    def divided_step(data: Nest) -> Logs:
        # Called from a custom loop: the data has been divided already.
        if not session.inside_keras or session.share is not None:
            return step(data)
        if trains and session.divides:
            checks.input_consistency.look(data)
        session.has_divided = session.divides
        part = _part(session, data, trains=trains)
        _warn_if_undivided(session, model, data, part.share.undivided)
        if trains and session.divides:
            part = checks.trial_steps.part(data, part)
        share = part.share
        checked: AbstractContextManager[None] = nullcontext()
        if session.divides and _computes_numbers(model, step, trains=trains):
            share = replace(share, data=part.data)
            if tf.executing_eagerly() and not share.undivided:
                checked = checks.eagerly(model, step, part.data)
        with checked, session.stepping(share, plain=_is_plain(model, step)):
            if trains:
                with checks.traced_draws.watch(model):
                    result = step(part.data)
            else:
                result = step(part.data)
        checks.row_terms.end_batch()
        if session.divides:
            checks.add_loss_check.look(model, part.data, part.share.undivided)
        return result

    setattr(divided_step, _MARK, True)
    return divided_step


def _computes_numbers(model: Model, step: Step, *, trains: bool) -> bool:
    """Whether the program's own code computes a loss or a number for a metric."""
    if not trains:
        return not internals.is_of_keras(step)
    return has_own_step(model) or _has_own_layers(model)


def _has_own_layers(model: Model) -> bool:
    """Whether the model has layers whose output for a row may depend on other rows."""
    return any(
        not internals.is_of_keras(type(layer))
        or isinstance(layer, keras.layers.Lambda)
        or internals.has_operations(layer)
        or internals.has_axis_of_rows(layer)
        for layer in internals.layers_of(model)
    )


def _is_plain(model: Model, step: Step) -> bool:
    """Whether a step's gradients certainly reach the optimizer unchanged."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return all(
        internals.is_of_keras(found)
        for found in [step]
        + [
            getattr(type(each), name)
            for each in (optimizer, inner)
            for name in ("apply", "apply_gradients")
            if each is not None
        ]
    )


def _part(session: Session, data: Nest, *, trains: bool) -> Part:
    if session.divides:
        return take_part(data, session.rank, session.size)
    # The ranks train in lockstep, but may have different numbers of test batches.
    return Part(data, Share(rows=_rows(data), counts=True, alone=not trains))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _warn_if_undivided(
    session: Session, model: Model, data: Nest, undivided: bool | Tensor
) -> None:
    leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
    if undivided is False or not any(leaf.shape[0] != 0 for leaf in leaves):
        return
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)

    def print_warning() -> None:
        session.warn(
            f"batches of {model.name} are not divided among the ranks: their tensors "
            f"({shapes}) differ in their numbers of rows, or one of them is a matrix "
            "of as many columns as rows, like the adjacency matrix of a graph. Every "
            "rank computes all of such a batch. The result is right, but no faster "
            "than on one machine"
        )

    def warn() -> np.bool_:
        print_warning()
        return np.bool_(False)

    if undivided is True:
        print_warning()
    else:
        tf.cond(
            undivided,
            lambda: tf.numpy_function(warn, [], tf.bool),
            lambda: tf.constant(False),
        )


def _rows(data: Nest) -> float | Tensor:
    rows: float | Tensor = take_part(data, 0, 1).share.rows
    return rows

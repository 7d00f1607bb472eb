"""A model's ``train_step`` and ``test_step`` get this rank's rows of every batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfcluster.runtime.keras.rows import Part, take_part
from tfcluster.runtime.keras.same_data import SameData
from tfcluster.runtime.keras.session import Session, Share

_STEPS = ("train_step", "test_step")
_MARK = "divides_batches"


def divide_steps(session: Session, model: Any, same_data: SameData) -> None:
    """Set them on this one model: so a subclass with steps of its own is served too."""
    for name in _STEPS:
        step = getattr(model, name)
        if not hasattr(step, _MARK):
            # Not setattr: Keras's tracking of attributes has no business with them.
            looks = same_data if name == "train_step" else None
            vars(model)[name] = _divided(session, step, looks)


def _divided(
    session: Session, step: Callable[[Any], Any], training: SameData | None
) -> Callable[[Any], Any]:
    @functools.wraps(step)
    def divided_step(data: Any) -> Any:
        # Called by a loop of the user's own, its data has been divided already.
        if not session.inside_keras or session.share is not None:
            return step(data)
        if training and session.divides:
            training.look(data)
        part = _part(session, data, trains=training is not None)
        with session.stepping(part.share):
            return step(part.data)

    setattr(divided_step, _MARK, True)
    return divided_step


def _part(session: Session, data: Any, *, trains: bool) -> Part:
    if session.divides:
        return take_part(data, session.rank, session.size)
    # The ranks train together, but may have other numbers of batches to test with.
    return Part(data, Share(rows=_rows(data), counts=True, alone=not trains))


def _rows(data: Any) -> Any:
    part = take_part(data, 0, 1)
    return part.share.rows

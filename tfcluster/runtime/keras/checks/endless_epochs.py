"""Warns about a ``fit`` whose first epoch never ends."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfcluster.runtime.keras.session import Session


def warn_of_endless_epochs(session: Session, arguments: Mapping[str, object]) -> None:
    """Warn if an infinite dataset has no ``steps_per_epoch``.

    ``arguments`` are the arguments of ``fit``, by name.
    """
    data = arguments.get("x")
    if not isinstance(data, tf.data.Dataset) or arguments.get("steps_per_epoch"):
        return
    if data.cardinality() == tf.data.INFINITE_CARDINALITY:
        session.warn(
            "the dataset is infinite and fit() has no steps_per_epoch: the first epoch "
            "never ends. Pass steps_per_epoch to fit(), or remove .repeat() from the "
            "dataset"
        )

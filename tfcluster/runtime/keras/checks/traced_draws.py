"""Handles Python or numpy random numbers that a training step draws while traced.

TensorFlow keeps these numbers as constants of its graph, so a step uses the numbers of
the trace from which it was compiled. One process traces the first step twice: the first
trace creates the variables of the optimizer and of the metrics. Ranks create these
variables outside of the graph and trace once, unless the program's own code is part of
the step's function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.tf_variables import made_at_once
from tfcluster.runtime.keras.types import Model, Variable


class TracedDraws:
    """Repeats a trace where one process would repeat it, and warns about other draws.

    Only the first trace draws some numbers: Keras draws a seed when a layer or a
    generator is created. A step that also draws in a later trace draws in every trace,
    and ranks trace a step of the program more often than one process does.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._traced = ObjectMap[bool]()
        """The models whose step has been traced."""

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.METRIC_VARIABLE: self._add_variable})

    def _add_variable(
        self, original: Callable[..., Variable], *args: object, **kwargs: object
    ) -> Variable:
        if not self._session.plain_step:
            return original(*args, **kwargs)
        with made_at_once():
            return original(*args, **kwargs)

    @contextmanager
    def watch(self, model: Model) -> Iterator[None]:
        """Surrounds the trace of a training step; does nothing in eager steps."""
        if tf.executing_eagerly():
            yield
            return
        again = model in self._traced
        self._traced[model] = True
        builds = not _is_built(model)
        before = _states()
        yield
        if before == _states():
            return
        if builds and _is_built(model):
            tf.Variable(False, trainable=False)  # Makes TensorFlow trace again.
        elif again:
            self._session.warn(
                f"the training step of {model.name} draws random numbers of Python or "
                "numpy. TensorFlow calls the step only to trace it, and then uses the "
                "same numbers in every step; on a cluster they are not the same as on "
                "one machine. Draw them with tf.random or keras.random, or before the "
                "step"
            )

    @contextmanager
    def watch_shards(self, model: Model) -> Iterator[None]:
        """Surrounds a training step that runs shard by shard.

        Raises CollectiveError if the step draws such numbers. A model's first step may
        draw them as seeds of the objects that it creates; then TensorFlow traces it
        again.
        """
        is_first = model not in self._traced
        self._traced[model] = True
        before = _states()
        yield
        if before == _states():
            return
        if not is_first:
            _refuse(self._session)
        elif not tf.executing_eagerly():
            tf.Variable(False, trainable=False)  # Makes TensorFlow trace again.


@contextmanager
def refusing_draws(session: Session) -> Iterator[None]:
    """Surrounds a function of the program that runs shard by shard.

    Raises CollectiveError if it draws random numbers of Python or numpy.
    """
    before = _states()
    yield
    if before != _states():
        _refuse(session)


def _refuse(session: Session) -> None:
    session.refuse(
        "a training step draws random numbers of Python or numpy. With runtime.shards, "
        "every shard draws its own numbers, and these depend on the number of "
        "ranks. Draw with keras.random and a keras.random.SeedGenerator, or before the "
        "step, or run the job without runtime.shards"
    )


def _is_built(model: Model) -> bool:
    return model.optimizer is None or bool(model.optimizer.built)


def _states() -> tuple[object, ...]:
    """The states of the generators that the modules' own functions use."""
    state = np.random.get_state(legacy=False)
    parts = {**state, **state["state"], "state": None}
    return random.getstate(), *(
        value.tobytes() if isinstance(value, np.ndarray) else value
        for value in parts.values()
    )

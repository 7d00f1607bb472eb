"""Shares non-trainable variables: mostly moving averages of ``BatchNormalization``.

With ``strategy: replicated``, the chief's values are also stored on the ps tasks, and
copied to all ranks before they are saved or evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies.optimizer_replica import described
from tfcluster.runtime.keras.strategies.optimizer_slots import unique
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.parameter_server.client import ParameterServerClient
from tfcluster.runtime.parameter_server.placement import Piece
from tfcluster.runtime.parameter_server.update_graph import serialised


class ModelVariables:
    """Tracks variables that layers update from data; shares the chief's values."""

    def __init__(
        self, session: Session, servers: Callable[[], ParameterServerClient]
    ) -> None:
        self._session = session
        self._connect = servers
        self._known: dict[int, Variable] = {}
        self._opened = 0
        self._applies = 0

    def seen(self, variables: Sequence[Variable]) -> None:
        """Register variables that layers update."""
        for variable in variables:
            self._known.setdefault(id(variable), variable)

    def sync_model_variables(self) -> None:
        """Copy the chief's values to ps tasks and ranks; every rank must call this."""
        session = self._session
        if not self._known or self._applies == session.applies:
            return
        self._applies = session.applies
        variables = list(self._known.values())
        key = f"model variables of {len(variables)}"
        servers = self._connect()
        if self._opened != len(variables):
            self._opened = len(variables)
            self._open(key, variables)
        if session.chief:
            for path, variable in zip(unique(variables), variables, strict=True):
                servers.assign(key, path, np.asarray(variable.numpy()))
        session.agreed("", "model variables of the chief")
        for variable, value in zip(variables, servers.pull(key), strict=True):
            raw(variable).assign(value)

    def _open(self, key: str, variables: Sequence[Variable]) -> None:
        def pack(pieces: Sequence[Piece], kinds: str) -> bytes:
            with tf.init_scope(), tf.device("CPU:0"):
                copies = [_zeros(variables[piece.variable]) for piece in pieces]
                return serialised(lambda gradients: None, copies, {}, kinds)

        self._connect().open(
            key,
            described(variables, rows_only=False),
            [np.asarray(variable.numpy()) for variable in variables],
            "-" * len(variables),
            pack,
        )


def _zeros(variable: Variable) -> tf.Variable:
    return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)

"""Refuses scripts that use a ``tf.distribute`` strategy with several replicas.

Its replicas would all-reduce gradients among themselves, and each of them with the
other ranks. Such a script needs ``strategy: none``. Strategies with one replica are
allowed, as they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.patching import wrap
from tfcluster.runtime.telemetry.agent_channel import reporter

_OF_CLUSTERS = (
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
)
_OF_ONE_HOST = ("MirroredStrategy", "CentralStorageStrategy")


def refuse_strategies() -> None:
    """Have TensorFlow's strategies raise CollectiveError when they are made."""
    for name in _OF_CLUSTERS:
        for cls in _classes(name):
            # Before it is made: it would wait for others, at the ranks' own addresses.
            wrap(cls, "__init__", partial(_refuse, name))
    for name in _OF_ONE_HOST:
        for cls in _classes(name):
            wrap(cls, "__init__", _refuse_replicas)


def refuse_replicas(strategy: Any) -> None:
    """Raise CollectiveError where a strategy has several replicas."""
    if strategy.num_replicas_in_sync > 1:
        raise _refusal(type(strategy).__name__)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise _refusal(name)


def _refuse_replicas(
    original: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any
) -> None:
    original(strategy, *args, **kwargs)
    refuse_replicas(strategy)
    reporter().warning(
        f"{type(strategy).__name__} has one replica and changes nothing: tfcluster "
        "trains on all ranks already"
    )


def _refusal(name: str) -> CollectiveError:
    return CollectiveError(
        f"the script creates a {name}, but tfcluster already trains on all ranks: "
        "remove it, or set 'runtime: {strategy: none}', which leaves the script alone"
    )


def _classes(name: str) -> set[type]:
    modules = (tf.distribute, tf.distribute.experimental)
    return {getattr(module, name) for module in modules if hasattr(module, name)}

"""Refuses scripts that use a ``tf.distribute`` strategy with several replicas.

Its replicas would all-reduce gradients among themselves, and each of them with the
other ranks. Such a script needs ``strategy: none``. Strategies with one replica are
allowed, as they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.types import Strategy
from tfcluster.runtime.telemetry.agent_channel import reporter

_P = ParamSpec("_P")


def refuse_strategies() -> None:
    """Make the constructors of TensorFlow's strategies raise CollectiveError."""
    for patch in tf_patches.STRATEGIES_OF_CLUSTERS:
        # Refuse the strategy before it waits for other tasks at the ranks' addresses.
        name = patch.target.rpartition(".")[2]
        tf_patches.TABLE.install({patch: partial(_refuse, name)})
    for patch in tf_patches.STRATEGIES_OF_ONE_HOST:
        tf_patches.TABLE.install({patch: _refuse_replicas})


def _refuse(name: str, *_: object, **__: object) -> None:
    raise _refusal(name)


def _refuse_replicas(
    original: Callable[Concatenate[Strategy, _P], None],
    strategy: Strategy,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> None:
    original(strategy, *args, **kwargs)
    if strategy.num_replicas_in_sync > 1:
        raise _refusal(type(strategy).__name__)
    reporter().warning(
        f"{type(strategy).__name__} has one replica and changes nothing: tfcluster "
        "trains on all ranks already"
    )


def _refusal(name: str) -> CollectiveError:
    return CollectiveError(
        f"the script creates a {name}, but tfcluster already trains on all ranks: "
        "remove it, or set 'runtime: {strategy: none}', which leaves the script alone"
    )

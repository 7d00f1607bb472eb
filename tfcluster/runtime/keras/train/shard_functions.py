"""Divides the batches of custom loops in the ``tf.function`` that trains on them.

This is for ``runtime.shards``. A loop gets whole batches, and every rank runs all of
its code. But a ``tf.function`` that gets a batch and computes gradients of weights runs
once for each of the rank's shards, like a ``train_step``: see ``shard_steps``. It
returns the results for the whole batch, with the same bits on all ranks. The first call
of each function is not divided, since it shows whether the function trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.keras.checks.traced_draws import refusing_draws
from tfcluster.runtime.keras.data.loop_rows import LoopRows
from tfcluster.runtime.keras.inner_functions import is_of_the_program
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import MOST_TRIALS, Session
from tfcluster.runtime.keras.train.shard_results import ShardResults
from tfcluster.runtime.keras.train.shard_steps import (
    ShardPart,
    ShardSteps,
    require_alike,
)
from tfcluster.runtime.tensor_types import Nest
from tfcluster.runtime.tf_internals import Function


@dataclass(slots=True)
class _Known:
    """What is known about a function that got a batch."""

    trains: bool
    by_shards: Callable[..., Any]
    is_tried: bool = False
    """Whether no trial is needed any more: see ``loss_scaling_probe``."""
    trials: int = 0


class ShardFunctions:
    """The hook on calls of a ``tf.function``."""

    def __init__(
        self,
        session: Session,
        steps: ShardSteps,
        rows: LoopRows,
        results: ShardResults,
    ) -> None:
        self._session = session
        self._steps = steps
        self._rows = rows
        self._results = results
        self._converted = tf_internals.conversion()
        self._known: weakref.WeakKeyDictionary[Function, _Known] = (
            weakref.WeakKeyDictionary()
        )

    def install(self) -> None:
        """Install the hook in TensorFlow, once per process."""
        tf_patches.TABLE.install({tf_patches.FUNCTION_CALL: self._call})

    def _call(
        self,
        original: Callable[..., object],
        function: Function,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        session = self._session
        if not is_of_the_program(function):
            return original(function, *args, **kwargs)
        if session.current_shard is not None and not session.plain_step:
            if tf.executing_eagerly():
                return original(function, *args, **kwargs)
            # In the graph of the step, where shards can wait for each other.
            return self._converted(function.python_function)(*args, **kwargs)
        if session.inside_keras or session.share or not tf.executing_eagerly():
            return original(function, *args, **kwargs)
        places = self._rows.of(_leaves(args, kwargs))
        known = self._known.get(function)
        if places and known is not None and known.trains:
            return self._by_shards(known, places, args, kwargs)
        before = session.exchanges
        result = original(function, *args, **kwargs)
        if places and known is None:
            trains = session.exchanges > before
            self._known[function] = _Known(trains, self._divided(function))
        return result

    def _by_shards(
        self,
        known: _Known,
        places: Sequence[int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> object:
        require_alike(self._session)
        trials = self._session.trials
        if trials is None or known.trials >= MOST_TRIALS:
            known.is_tried = True
        elif not known.is_tried and not known.trials:
            known.is_tried = not trials.allowed()
        judged = 0 if trials is None else trials.judged
        tries = not known.is_tried
        known.trials += tries
        # The code of the loop gets no part of the batch.
        result = known.by_shards(tuple(places), tries, tuple(args), dict(kwargs))
        if trials is not None and trials.judged > judged:
            known.is_tried = True
        return result

    def _divided(self, function: Function) -> Callable[..., Any]:
        """The function that computes what ``function`` does, shard by shard."""
        session, steps = self._session, self._steps
        # The program's function lives as long as it calls this one.
        reference = weakref.ref(function)

        def by_shards(
            places: Sequence[int],
            tries: bool,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Nest:
            called = reference()
            assert called is not None
            run = self._converted(called.python_function)
            leaves, where = _leaves(args, kwargs), user_line()

            def of_shard(part: ShardPart) -> Nest:
                # The rows of one shard show whether a loss is a mean over rows.
                data = part.data if part is parts[0] else None
                share = replace(part.share, data=data)
                own = [*leaves]
                for place, rows in zip(places, tf.nest.flatten(part.data), strict=True):
                    own[place] = rows
                theirs, named = tf.nest.pack_sequence_as((args, kwargs), own)
                with session.stepping(share, shard=part.shard):
                    result = run(*theirs, **named)
                    if part is parts[0]:
                        self._results.look(result, where)
                    return result

            def merged(found: Sequence[Nest]) -> Nest:
                if trial is not None:
                    self._results.compare(found[0], found[-1])
                return self._results.merged(found[: len(parts)], parts)

            parts = steps.parts([leaves[place] for place in places])
            trial = steps.trial(parts[0]) if tries else None
            with session.stepping(steps.share(parts)), refusing_draws(session):
                return steps.run(parts, trial, [], of_shard, merged)

        by_shards.__name__ = f"{function.name}_by_shards"
        return tf.function(by_shards, autograph=False)


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return list(tf.nest.flatten((tuple(args), dict(kwargs))))

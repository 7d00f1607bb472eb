"""Puts a hook in place of functions, as the runtime does, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.context import Context
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction,
)

from tests.runtime.partition.effect_order import races
from tfcluster.runtime.partition.exchange import ExchangeRequest
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.writer import OpWriter, Ref

# Functions begin sooner without the optimization of graphs, which other tests have.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


class RanksThatCall(Ranks):
    """Ranks of this process whose programs nevertheless call a host to exchange."""

    @property
    def exchanges(self) -> bool:
        return True


class Echo:
    """An exchanger whose host returns what it gets: the terms of all ranks."""

    words = ()
    bucket_bytes = 1 << 10
    scatters = False

    def __init__(self) -> None:
        self._host = HostFunction(lambda *arrays: list(arrays))

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        dtypes = [request.ref.dtype for request in requests]
        attributes = {"token": self._host.token, "Tout": dtypes}
        inputs = [[request.ref for request in requests]]
        return writer.op("PyFunc", inputs, attributes, "exchange")


@contextmanager
def simulated_ranks(
    size: int, *, strict: bool = True, call: bool = False
) -> Iterator[Hook]:
    """Divide all functions that run within among ``size`` ranks of this process.

    With ``call``, exchanges are calls of the host. No two ops of a program may race.
    """
    kind = RanksThatCall if call else Ranks
    ranks = kind(size, tuple(range(size)))
    with installed(Hook(ranks, lambda label: Echo(), strict=strict)) as hook:
        yield hook
        for program in hook.programs:
            if program.written is not None:
                assert races(program.written.definitions[0]) == []


@contextmanager
def installed(hook: Hook) -> Iterator[Hook]:
    """Run functions by this hook."""
    calls, flat_calls = Context.call_function, ConcreteFunction._call_flat

    def call(context: Context, *args: Any) -> Any:
        return hook.call(calls, context, *args)

    def flat_call(function: ConcreteFunction, *args: Any, **kwargs: Any) -> Any:
        return hook.flat_call(flat_calls, function, *args, **kwargs)

    Context.call_function, ConcreteFunction._call_flat = call, flat_call
    try:
        yield hook
    finally:
        Context.call_function = calls
        ConcreteFunction._call_flat = flat_calls

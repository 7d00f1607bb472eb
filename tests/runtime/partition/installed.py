"""Puts a hook in place of functions, as the runtime does, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.python.eager.context import Context
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction,
)

from tests.runtime.partition.effect_order import races
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.placement import Ranks


@contextmanager
def simulated_ranks(size: int, *, strict: bool = True) -> Iterator[Hook]:
    """Divide all functions that run within among ``size`` ranks of this process.

    No two ops of a program may race.
    """
    with installed(Hook(Ranks(size, tuple(range(size))), strict=strict)) as hook:
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

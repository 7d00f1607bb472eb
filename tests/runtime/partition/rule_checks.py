"""Checks that a rule is right, whatever the placements of its op's inputs are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import Phase, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime.partition.simulated import MORE, SIZES, Divided, divide
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
    is_whole,
)
from tfcluster.runtime.partition.rules.all import RULES

Array = NDArray[Any]

BFLOAT16: Any = tf.bfloat16.as_numpy_dtype
HALVES = (np.float16, BFLOAT16)
WIDE_FLOATS = (np.float32, np.float64)
FLOATS = (*HALVES, *WIDE_FLOATS)
INTEGERS = (np.int32, np.int64)
COMPLEX = (np.complex64, np.complex128)

_UNITS = {np.dtype(np.float16): 2.0**-6, np.dtype(BFLOAT16): 2.0**-3}
"""Numbers are multiples of a unit, 2**-12 if not here, so that terms add up exactly."""

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
few = settings(max_examples=1 * MORE, deadline=None, phases=_PHASES)
"""For tests that have a case for each op of a family."""
some = settings(max_examples=3 * MORE, deadline=None, phases=_PHASES)
"""For tests of one thing."""
seeds = st.integers(0, 2**32 - 1)

# The ops are run as they are written: sooner, and not as other ops that do the same.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@dataclass(frozen=True)
class Case:
    """An op with sample inputs."""

    call: Callable[..., Any]
    inputs: Sequence[Array]
    plain: Sequence[Placement]
    """Placements of inputs with which nothing may be computed whole.

    ``Partial`` stands for an input that the function gets by a reduction over rows.
    """
    ulps: float = 8.0
    """The largest difference of results, in units in the last place of the largest."""
    outputs: Sequence[Placement] | None = None
    """The placements of the outputs in the plain case, if they are to be checked."""
    adds_up: bool = False
    """Whether rows are put into terms, unless the result is larger than all rows."""


def raw(op: str, **attributes: Any) -> Callable[..., Any]:
    """A function that calls an op with its inputs in the order of its definition."""
    definition = tf_functions.op_def(op)
    assert definition is not None, op
    function = getattr(tf.raw_ops, op)
    names = list(inspect.signature(function).parameters)[: len(definition.input_arg)]

    def call(*inputs: Any) -> Any:
        return function(**dict(zip(names, inputs, strict=True)), **attributes)

    return call


def ops_of(module: ModuleType) -> set[str]:
    """The ops for which a module of the rules has a rule."""
    found: set[str] = set()
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "rule":
            continue
        for node in (each for given in call.args for each in ast.walk(given)):
            if isinstance(node, ast.Constant):
                found.add(str(node.value))
            elif isinstance(node, ast.Name):
                found.update(vars(module)[node.id])
    assert found <= {*RULES}
    return found


@dataclass
class Chance:
    """Random choices for one example, all from one seed."""

    seed: int
    random: np.random.Generator = field(init=False)
    size: int = field(init=False)
    """The number of ranks."""
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.size = self.of(SIZES)
        self.rows = self.size + self.below(5)

    def below(self, end: int) -> int:
        return int(self.random.integers(end))

    def of(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def yes(self, probability: float = 0.5) -> bool:
        return bool(self.random.random() < probability)

    def dims(self, count: int, sizes: Sequence[int] = (1, 2, 3)) -> tuple[int, ...]:
        return tuple(self.of(sizes) for _ in range(count))

    def shard(self, dim: int) -> Shard:
        """Rows in this dimension, now and then merged with other dimensions."""
        if self.yes(0.6):
            return Shard(dim, self.rows)
        return Shard(dim, self.rows, self.of((1, 2)), self.of((1, 2, 3)))

    def batch(
        self, outer: Sequence[int] = (0, 2), own: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], Shard]:
        """A shape with rows in one of its first dimensions, which are followed by
        ``own``; there are ``outer[0]`` to ``outer[1]`` more of the first."""
        first = [*self.dims(outer[0] + self.below(outer[1] - outer[0] + 1))]
        if first and self.yes(0.1):
            first[self.below(len(first))] = 0
        shard = self.shard(self.below(len(first) + 1))
        first.insert(shard.dim, shard.size)
        return (*first, *own), shard

    def numbers(
        self,
        shape: Sequence[int],
        dtype: Any = np.float32,
        low: float = -3.0,
        high: float = 3.0,
    ) -> Array:
        """Numbers of any dtype."""
        kind = np.dtype(dtype)
        if kind == np.bool_:
            return self.random.random(shape) < 0.5
        if kind.kind in "iu":
            first = 0 if kind.kind == "u" and low < 0 else int(np.ceil(low))
            return self.random.integers(first, int(high) + 1, shape).astype(kind)
        found = self._reals(shape, kind, low, high)
        if kind.kind == "c":
            found = found + 1j * self._reals(shape, kind, low, high)
        return np.asarray(found).astype(kind)

    def _reals(
        self, shape: Sequence[int], dtype: np.dtype[Any], low: float, high: float
    ) -> Array:
        unit = _UNITS.get(dtype, 2.0**-12)
        found = np.round(self.random.uniform(low, high, shape) / unit) * unit
        return np.clip(found, low, high)

    def spoiled(self, array: Array) -> Array:
        """The array with some infinite elements and some that are not numbers."""
        values = self.random.choice([np.inf, -np.inf, np.nan], array.shape)
        found: Array = np.where(self.random.random(array.shape) < 0.3, values, array)
        return found.astype(array.dtype)

    # --- placements -------------------------------------------------------------------

    def placement(self, array: Array) -> Placement:
        """Any placement that an input may have."""
        shards = [
            Shard(dim, self.rows, outer, inner)
            for dim, size in enumerate(array.shape)
            if size and size % self.rows == 0
            for outer, inner in _factors(size // self.rows)
        ]
        partial = Partial("max") if array.dtype == np.bool_ else SUM
        kind = self.below(4)
        if kind == 0 or (kind < 3 and not shards):
            return REPLICATE
        if kind == 3 and array.dtype.kind in "biufcV":
            return partial
        return REPLICATE if not shards else shards[self.below(len(shards))]

    def terms(self, array: Array, placement: Partial) -> Array:
        """Rows of terms, whose reduction is the array, exactly."""
        rows, last = self.rows, self.below(self.rows)
        if placement.op != "sum":
            terms: Array = np.broadcast_to(array, (rows, *array.shape)).copy()
            if array.dtype == np.bool_:
                identity = placement.op == "min"
                terms[self.random.random(terms.shape) < 0.5] = identity
                terms[last] = array
            return terms
        small = self.numbers((rows, *array.shape), array.dtype, -1, 1)
        finite = np.isfinite(array)
        small[last] = 0
        rest = small.sum(axis=0, dtype=array.dtype)
        with np.errstate(all="ignore"):
            small[last] = np.where(finite, array - rest, array)
        return small


def _factors(number: int) -> Iterable[tuple[int, int]]:
    return [(d, number // d) for d in range(1, number + 1) if number % d == 0]


def run(
    case: Case,
    placements: Sequence[Placement],
    chance: Chance,
    compare: bool = True,
) -> Divided:
    """The case with these placements of its inputs, beside the whole."""
    arguments: list[Array] = []
    given: list[Placement] = []
    for array, placement in zip(case.inputs, placements, strict=True):
        if isinstance(placement, Partial):
            arguments.append(chance.terms(array, placement))
            given.append(Shard(0, chance.rows))
        else:
            arguments.append(array)
            given.append(placement)

    def function(*inputs: Any) -> Any:
        return case.call(
            *(
                _reduced(each, placement.op) if isinstance(placement, Partial) else each
                for each, placement in zip(inputs, placements, strict=True)
            )
        )

    return divide(function, arguments, given, chance.size, chance.rows, compare)


def _reduced(rows: Any, op: str) -> Any:
    if rows.dtype == tf.bool:
        return tf.reduce_any(rows, 0) if op == "max" else tf.reduce_all(rows, 0)
    return {"sum": tf.reduce_sum, "max": tf.reduce_max, "min": tf.reduce_min}[op](
        rows, 0
    )


def assert_close(found: Divided, ulps: float) -> None:
    """Equal bits if ``ulps`` is 0."""
    epsilon = max((_epsilon(each.dtype) for each in found.whole), default=0.0)
    found.assert_equal(ulps * epsilon)


def _epsilon(dtype: np.dtype[Any]) -> float:
    return _EPSILONS.get(dtype, 0.0)


_EPSILONS = {
    np.dtype(np.float16): 2.0**-10,
    np.dtype(BFLOAT16): 2.0**-7,
    np.dtype(np.float32): 2.0**-23,
    np.dtype(np.float64): 2.0**-52,
    np.dtype(np.complex64): 2.0**-23,
    np.dtype(np.complex128): 2.0**-52,
}


def _rows_of(case: Case) -> int:
    """The size of all divided inputs."""
    placed = zip(case.inputs, case.plain, strict=True)
    return sum(array.size for array, each in placed if isinstance(each, Shard))


def check(make: Callable[[Chance], Case], seed: int, others: int = 1) -> None:
    """The plain placements divide the op, and any others are computed right, too."""
    chance = Chance(seed)
    case = make(chance)
    plain = run(case, case.plain, chance)
    about = f"{chance.size} ranks, {[each.shape for each in case.inputs]}"
    assert not plain.computed_whole, (plain.computed_whole, about)
    expected = case.outputs
    if case.adds_up and _rows_of(case) < plain.whole[0].size:
        expected = [REPLICATE]
    else:
        assert not all(map(is_whole, plain.outputs)), about
    if expected is not None:
        assert plain.outputs == list(expected), about
    assert_close(plain, case.ulps)
    for _ in range(others):
        placements = [chance.placement(each) for each in case.inputs]
        found = run(case, placements, chance)
        try:
            assert_close(found, case.ulps)
        except AssertionError as error:
            names = ", ".join(map(str, placements))
            raise AssertionError(f"{about}, {names}: {error}") from error

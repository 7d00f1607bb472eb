"""Rules of ops that put parts into a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    INTEGERS,
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    check,
    few,
    ops_of,
    raw,
    seeds,
)
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules import scatters

SCATTERS = ("Add", "Sub", "Update", "Max", "Min")
SEGMENTS = ("Sum", "Mean", "Prod", "Max", "Min")
OTHERS = {"XlaDynamicUpdateSlice", "Bincount", "HistogramFixedWidth"}


def test_every_op_has_a_case() -> None:
    known = {f"TensorScatter{kind}" for kind in SCATTERS}
    known |= {f"Segment{kind}" for kind in SEGMENTS}
    for kind in ("Sum", "Mean", "SqrtN"):
        name = f"SparseSegment{kind}"
        known |= {name, f"{name}WithNumSegments", f"{name}Grad"}
    assert known | OTHERS == ops_of(scatters)


@pytest.mark.parametrize("kind", SCATTERS)
@given(seeds)
@few
def test_slices_are_scattered(kind: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        dtype = chance.of((*WIDE_FLOATS, *INTEGERS))
        own, shard = chance.batch((0, 1))
        # Nothing can be scattered into an empty tensor.
        own = tuple(size or 1 for size in own)
        before, depth = chance.of(((4,), (2, 2))), chance.of((1, 2))
        sizes = (5, 4)[:depth]
        count = int(np.prod(before))
        # Without duplicates, of which any may be the last.
        flat = chance.random.permutation(int(np.prod(sizes)))[:count]
        indices = np.stack(np.unravel_index(flat, sizes), -1)
        return Case(
            raw(f"TensorScatter{kind}"),
            [
                chance.numbers((*sizes, *own), dtype),
                indices.reshape(*before, depth).astype(chance.of(INTEGERS)),
                chance.numbers((*before, *own), dtype),
            ],
            [
                shard.at(shard.dim + depth),
                REPLICATE,
                chance.of((REPLICATE, shard.at(shard.dim + len(before)))),
            ],
            outputs=[shard.at(shard.dim + depth)],
        )

    check(make, seed)


@pytest.mark.parametrize("kind", [kind for kind in SCATTERS if kind != "Update"])
@given(seeds)
@few
def test_rows_are_scattered(kind: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        dtype = chance.of((*WIDE_FLOATS, *INTEGERS))
        before, shard = chance.batch((0, 1))
        own = chance.dims(chance.below(2))
        is_sum = kind in ("Add", "Sub")
        return Case(
            raw(f"TensorScatter{kind}"),
            [
                chance.numbers((4, *own), dtype),
                chance.random.integers(0, 4, (*before, 1)),
                chance.numbers((*before, *own), dtype),
            ],
            [SUM if is_sum and chance.yes() else REPLICATE, shard, shard],
            outputs=[SUM if is_sum else Partial(kind.lower())],
            adds_up=True,
        )

    check(make, seed)


@given(seeds)
@few
def test_slice_is_updated(seed: int) -> None:
    from tensorflow.compiler.tf2xla.python import xla

    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 2))
        part = [size if dim == shard.dim else 1 for dim, size in enumerate(shape)]
        if 0 in shape:
            part = list(shape)
        return Case(
            xla.dynamic_update_slice,
            [
                chance.numbers(shape),
                chance.numbers(part),
                chance.random.integers(-1, 3, len(shape)).astype(np.int32),
            ],
            [shard, shard, REPLICATE],
            outputs=[shard],
        )

    check(make, seed, others=0)


def _segment_ids(chance: Chance, count: int) -> Array:
    steps = chance.random.integers(0, 3, count)
    found: Array = np.cumsum(steps).astype(chance.of(INTEGERS))
    return found


@pytest.mark.parametrize("kind", SEGMENTS)
@given(seeds)
@few
def test_segments(kind: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        dtype = chance.of((*WIDE_FLOATS, *INTEGERS))
        by_rows = kind == "Sum" and chance.yes(0.7)
        if by_rows:
            shard = Shard(0, chance.rows, 1, chance.of((1, 2)))
            shape: tuple[int, ...] = (shard.size, *chance.dims(chance.below(2)))
        else:
            shape, shard = chance.batch((1, 2))
            if shard.dim == 0:
                shape, shard = (3, *shape), shard.at(1)
        return Case(
            raw(f"Segment{kind}"),
            [chance.numbers(shape, dtype), _segment_ids(chance, shape[0])],
            [shard, shard if by_rows and chance.yes() else REPLICATE],
            outputs=[SUM if by_rows else shard],
        )

    check(make, seed)


@pytest.mark.parametrize("form", ["", "WithNumSegments", "Grad"])
@pytest.mark.parametrize("kind", ["Sum", "Mean", "SqrtN"])
@given(seeds)
@few
def test_sparse_segments(kind: str, form: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard = chance.shard(1)
        count = 1 + chance.below(5)
        ids = np.minimum(_segment_ids(chance, count), 4).astype(np.int32)
        inputs = [
            chance.numbers((5, shard.size), chance.of(WIDE_FLOATS)),
            chance.random.integers(0, 5, count).astype(np.int32),
            ids,
        ]
        if form:
            inputs.append(np.array(5, np.int32))
        plain: list[Placement] = [shard, *[REPLICATE] * (len(inputs) - 1)]
        name = f"SparseSegment{kind}{form}"
        return Case(raw(name), inputs, plain, outputs=[shard])

    check(make, seed)


@given(seeds)
@few
def test_numbers_are_counted(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((0, 1))
        has_weights = chance.yes()
        weights = chance.numbers(shape if has_weights else (0,))
        return Case(
            raw("Bincount"),
            [
                chance.random.integers(0, 6, shape).astype(np.int32),
                np.array(4, np.int32),
                weights,
            ],
            [shard, REPLICATE, shard if has_weights else REPLICATE],
            outputs=[SUM],
        )

    check(make, seed)


@given(seeds)
@few
def test_histogram(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((0, 1))
        limits = np.array([-1, 2], np.float32)
        return Case(
            raw("HistogramFixedWidth", dtype=tf.int32),
            [chance.numbers(shape), limits, np.array(5, np.int32)],
            [shard, REPLICATE, REPLICATE],
            outputs=[SUM],
        )

    check(make, seed)

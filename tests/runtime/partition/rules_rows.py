"""Rules of ops that treat rows alike, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    assert_close,
    check,
    few,
    ops_of,
    raw,
    run,
    seeds,
    some,
)
from tests.runtime.partition.rules_boxes import MATRICES
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules import rows

ULPS = 64


def _with(*constants: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Constant inputs after the first ones."""
    return lambda call: lambda *inputs: call(*inputs, *map(tf.constant, constants))


def _floats(own: Sequence[int], *dtypes: Any) -> Callable[[Chance], Any]:
    """Inputs with ``own`` dimensions after the outer ones."""

    def make(chance: Chance) -> tuple[Array, Shard]:
        shape, shard = chance.batch(own=own)
        return chance.numbers(shape, chance.of(dtypes or WIDE_FLOATS)), shard

    return make


def _positive(*dtypes: Any) -> Callable[[Chance], Any]:
    """Symmetric positive definite matrices."""

    def make(chance: Chance) -> tuple[Array, Shard]:
        shape, shard = chance.batch(own=(3, 3))
        factor = chance.numbers(shape, chance.of(dtypes or WIDE_FLOATS), -0.25, 0.25)
        product = factor @ np.swapaxes(factor, -1, -2)
        # Eigenvalues apart from each other: else a last bit turns the vectors.
        return (product + np.diag([1.0, 2.0, 3.0])).astype(factor.dtype), shard

    return make


def _colours(*own: int) -> Callable[[Chance], Any]:
    def make(chance: Chance) -> tuple[Array, Shard]:
        shape, shard = chance.batch(own=(*own, 3))
        return chance.numbers(shape, np.float32, 0, 1), shard

    return make


def _four_dimensions(chance: Chance) -> tuple[Array, Shard]:
    shape, shard = chance.batch((2, 2), (5,))
    return chance.numbers(shape, chance.of((np.float16, np.float32))), shard


def _matrix(chance: Chance) -> tuple[Array, Shard]:
    """A single matrix, whose rows are those of the batch."""
    return chance.numbers((chance.rows, 4), chance.of(FLOATS)), Shard(0, chance.rows)


def _real_transform(op: str, dimensions: int) -> Callable[..., Any]:
    def call(values: Any) -> Any:
        if op.startswith("I"):
            real = tf.as_dtype(values.dtype).real_dtype
            transform = raw(op, Treal=real)
        else:
            wide = values.dtype == tf.float64
            transform = raw(op, Tcomplex=tf.complex128 if wide else tf.complex64)
        return transform(values, tf.constant([4] * dimensions))

    return call


Sample = tuple[Callable[..., Any], Callable[[Chance], Any]]
SCALE = np.float32(0.5)
ANY = (*FLOATS, *INTEGERS)

ONE_INPUT: dict[str, Sample] = {
    **{op: (raw(op), _matrix) for op in ("Softmax", "LogSoftmax")},
    "TopKV2": (_with(2)(raw("TopKV2")), _floats([4], *ANY)),
    "NthElement": (_with(1)(raw("NthElement", reverse=True)), _floats([4])),
    "LRN": (raw("LRN", depth_radius=1, beta=0.5), _four_dimensions),
    **{
        op: (_with(SCALE)(raw(op)), _colours(2, 2))
        for op in ("AdjustHue", "AdjustSaturation", "AdjustContrastv2")
    },
    **{op: (raw(op), _colours()) for op in ("HSVToRGB", "RGBToHSV")},
    **{
        op: (raw(op), _floats([3] * count, *COMPLEX))
        for count, name in enumerate(("FFT", "FFT2D", "FFT3D"), 1)
        for op in (name, f"I{name}")
    },
    **{
        name: (_real_transform(name, count), _floats([4] * count))
        for count, name in enumerate(("RFFT", "RFFT2D", "RFFT3D"), 1)
    },
    **{
        name: (
            _real_transform(name, count),
            _floats([*[4] * (count - 1), 3], *COMPLEX),
        )
        for count, name in enumerate(("IRFFT", "IRFFT2D", "IRFFT3D"), 1)
    },
    "MatrixDiag": (raw("MatrixDiag"), _floats([3], *ANY)),
    "MatrixDiagPart": (raw("MatrixDiagPart"), _floats([3, 2], *ANY)),
    "MatrixBandPart": (_with(1, 0)(raw("MatrixBandPart")), _floats([3, 4], *ANY)),
    **{
        op: (raw(op), _positive())
        for op in ("Cholesky", "MatrixInverse", "MatrixDeterminant", "Lu")
    },
    **{op: (raw(op), _positive()) for op in ("LogMatrixDeterminant", "Qr")},
    "MatrixSquareRoot": (raw("MatrixSquareRoot"), _positive(*COMPLEX)),
    "MatrixLogarithm": (raw("MatrixLogarithm"), _positive(*COMPLEX)),
    "SelfAdjointEigV2": (raw("SelfAdjointEigV2"), _positive()),
    "Svd": (raw("Svd"), _positive()),
    "Eig": (raw("Eig", Tout=tf.complex128), _positive(np.float64)),
}
OTHERS = {
    *("MatrixDiagV2", "MatrixDiagV3", "MatrixDiagPartV2", "MatrixDiagPartV3"),
    *("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3", "UnravelIndex"),
    *("MatrixSolve", "MatrixTriangularSolve", "CholeskyGrad", "ReverseSequence"),
    *("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"),
    *("InTopK", "InTopKV2", "LowerBound", "UpperBound"),
    *("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    *("GRUBlockCell", "LSTMBlockCell"),
}


def test_every_op_has_a_case() -> None:
    assert {*ONE_INPUT, *OTHERS, *MATRICES} == ops_of(rows)


@pytest.mark.parametrize("op", ONE_INPUT)
@given(seeds)
@few
def test_of_one_input(op: str, seed: int) -> None:
    """The rows are in an outer dimension; in the op's own ones it is not divided."""
    call, sample = ONE_INPUT[op]

    def make(chance: Chance) -> Case:
        values, shard = sample(chance)
        return Case(call, [values], [shard], ULPS)

    check(make, seed)


@pytest.mark.parametrize("op", ONE_INPUT)
@given(seeds)
@few
def test_rows_in_a_dimension_of_the_op(op: str, seed: int) -> None:
    if op in ("HSVToRGB", "RGBToHSV", "AdjustHue", "AdjustSaturation"):
        return  # These have three colours.
    chance = Chance(seed)
    call, sample = ONE_INPUT[op]
    values = sample(chance)[0]
    last = Shard(values.ndim - 1, values.shape[-1])
    if 0 not in values.shape and values.shape[-1] >= chance.size:
        chance.rows = last.rows
        assert_close(run(Case(call, [values], []), [last], chance), ULPS)


@pytest.mark.parametrize(
    ("op", "attributes", "asked"),
    [
        ("Svd", {"compute_uv": False}, 1),
        ("Svd", {"full_matrices": True}, 3),
        ("SelfAdjointEigV2", {"compute_v": False}, 1),
        ("Eig", {"compute_v": False, "Tout": tf.complex128}, 1),
        ("Qr", {"full_matrices": True}, 2),
    ],
)
@given(seeds)
@few
def test_parts_of_a_decomposition(
    op: str, attributes: dict[str, Any], asked: int, seed: int
) -> None:
    """Outputs that are not asked for have no rows, and may hold anything."""

    def call(values: Any) -> Any:
        found = raw(op, **attributes)(values)
        for rest in found[asked:]:
            assert rest.shape.num_elements() == 0
        return found[:asked]

    def make(chance: Chance) -> Case:
        values, shard = _positive(np.float64)(chance)
        return Case(call, [values], [shard], ULPS, [shard] * asked)

    check(make, seed)


@pytest.mark.parametrize("band", [(0, 0), (1, 1), (-1, 0), (0, 1)])
@pytest.mark.parametrize("op", ["MatrixDiagV2", "MatrixDiagV3"])
@given(seeds)
@few
def test_matrices_of_diagonals(op: str, band: tuple[int, int], seed: int) -> None:
    def make(chance: Chance) -> Case:
        count = band[1] - band[0] + 1
        shape, shard = chance.batch(own=(3,) if count == 1 else (count, 3))
        values = chance.numbers(shape, chance.of((np.float32, np.int32)))
        k = band[0] if count == 1 and chance.yes() else band
        padding = np.array(7, values.dtype)
        call = _with(np.array(k, np.int32), -1, -1, padding)(raw(op))
        return Case(call, [values], [shard], 0)

    check(make, seed)


@pytest.mark.parametrize("op", ["MatrixDiagV2", "MatrixDiagV3"])
@given(seeds)
@few
def test_matrices_of_divided_bands(op: str, seed: int) -> None:
    """Each rank has some of the diagonals: that is no part of a matrix."""
    chance = Chance(seed)
    chance.rows = rows = max(chance.rows, 2)
    band = np.array([0, rows - 1], np.int32)
    call = _with(band, -1, -1, np.float32(7))(raw(op))
    case = Case(call, [chance.numbers((2, rows, rows))], [])
    run(case, [Shard(1, rows)], chance).assert_equal()


@pytest.mark.parametrize("band", [(0, 0), (1, 1), (-1, 0), (0, 1)])
@pytest.mark.parametrize("op", ["MatrixDiagPartV2", "MatrixDiagPartV3"])
@given(seeds)
@few
def test_diagonals_of_matrices(op: str, band: tuple[int, int], seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch(own=(3, 3))
        values = chance.numbers(shape)
        call = _with(np.array(band, np.int32), np.float32(7))(raw(op))
        return Case(call, [values], [shard], 0, [shard])

    check(make, seed)


@pytest.mark.parametrize("band", [(0, 0), (1, 1), (-1, 0)])
@pytest.mark.parametrize("op", ["MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3"])
@given(seeds)
@few
def test_diagonals_are_set(op: str, band: tuple[int, int], seed: int) -> None:
    def make(chance: Chance) -> Case:
        used = (0, 0) if op == "MatrixSetDiag" else band
        count = used[1] - used[0] + 1
        shape, shard = chance.batch(own=(3, 3))
        length = 3 - (used == (1, 1))
        own = (length,) if count == 1 else (count, length)
        inputs = [chance.numbers(shape), chance.numbers((*shape[:-2], *own))]
        call = raw(op)
        if op != "MatrixSetDiag":
            call = _with(np.array(used, np.int32))(call)
        return Case(call, inputs, [shard, shard], 0, [shard])

    check(make, seed, others=2)


@given(seeds)
@some
def test_coordinates(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        indices = chance.numbers((shard.size,), chance.of(INTEGERS), 0, 5)
        call = _with(np.array([2, 3], indices.dtype))(raw("UnravelIndex"))
        return Case(call, [indices], [shard], 0, [shard.at(1)])

    check(make, seed)


@pytest.mark.parametrize("op", ["MatrixSolve", "MatrixTriangularSolve", "CholeskyGrad"])
@given(seeds)
@few
def test_of_two_stacks(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        matrices, shard = _positive()(chance)
        second = (*matrices.shape[:-1], 3 if op == "CholeskyGrad" else 2)
        inputs = [matrices, chance.numbers(second, matrices.dtype)]
        attributes = {"adjoint": chance.yes()} if op != "CholeskyGrad" else {}
        return Case(raw(op, **attributes), inputs, [shard, shard], ULPS, [shard])

    check(make, seed, others=2)


@given(seeds)
@few
def test_one_matrix_for_all_rows(seed: int) -> None:
    chance = Chance(seed)
    values = chance.numbers((chance.rows, 2, 1))
    matrix = np.array([[[2, 0], [1, 4]]], np.float32)
    case = Case(raw("MatrixTriangularSolve"), [matrix, values], [])
    found = run(case, [REPLICATE, Shard(0, chance.rows)], chance)
    assert_close(found, ULPS)


@pytest.mark.parametrize("broadcast", ["nothing", "logits", "labels", "classes"])
@given(seeds)
@few
def test_cross_entropy_of_distributions(broadcast: str, seed: int) -> None:
    chance = Chance(seed)
    shard = chance.shard(0)
    chance.rows, full = shard.rows, (shard.size, 3)
    shapes = {
        "nothing": [full, full],
        "logits": [(1, 3), full],
        "labels": [full, (1, 3)],
        "classes": [full, (shard.size, 1)],
    }[broadcast]
    dtype = chance.of(FLOATS)
    inputs = [chance.numbers(shape, dtype, 0, 1) for shape in shapes]
    case = Case(raw("SoftmaxCrossEntropyWithLogits"), inputs, [])
    plain = [shard if shape[0] == shard.size else REPLICATE for shape in shapes]
    found = run(case, plain, chance)
    assert_close(found, ULPS)
    if broadcast in ("nothing", "classes"):
        assert found.outputs == [shard, shard]
    placements = [chance.placement(each) for each in inputs]
    assert_close(run(case, placements, chance), ULPS)


@given(seeds)
@some
def test_cross_entropy_of_classes(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        inputs = [
            chance.numbers((shard.size, 3), chance.of(FLOATS)),
            chance.numbers((shard.size,), chance.of(INTEGERS), 0, 2),
        ]
        call = raw("SparseSoftmaxCrossEntropyWithLogits")
        return Case(call, inputs, [shard, shard], ULPS, [shard, shard])

    check(make, seed, others=2)


@pytest.mark.parametrize("op", ["InTopK", "InTopKV2"])
@given(seeds)
@few
def test_in_top_k(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        inputs = [
            chance.numbers((shard.size, 4), np.float32),
            chance.numbers((shard.size,), np.int32, 0, 3),
        ]
        call = raw(op, k=2) if op == "InTopK" else _with(2)(raw(op))
        return Case(call, inputs, [shard, shard], 0, [shard])

    check(make, seed, others=2)


@pytest.mark.parametrize("op", ["LowerBound", "UpperBound"])
@given(seeds)
@few
def test_search(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard, dtype = chance.shard(0), chance.of((*WIDE_FLOATS, *INTEGERS))
        inputs = [
            np.sort(chance.numbers((shard.size, 4), dtype), axis=1),
            chance.numbers((shard.size, 3), dtype),
        ]
        return Case(raw(op), inputs, [shard, shard], 0, [shard])

    check(make, seed, others=2)


@pytest.mark.parametrize("rows_in", ["the entries with lengths", "another dimension"])
@given(seeds)
@few
def test_reverse_sequence(rows_in: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((2, 2))
        others = [dim for dim in range(3) if dim != shard.dim]
        by_rows = rows_in == "the entries with lengths"
        batch = shard.dim if by_rows else chance.of(others)
        sequence = chance.of([dim for dim in others if dim != batch])
        lengths = chance.numbers((shape[batch],), np.int64, 0, shape[sequence])
        call = raw("ReverseSequence", seq_dim=sequence, batch_dim=batch)
        of_lengths: Placement = shard.at(0) if by_rows else REPLICATE
        inputs = [chance.numbers(shape, chance.of(WIDE_FLOATS)), lengths]
        return Case(call, inputs, [shard, of_lengths], 0, [shard])

    check(make, seed, others=2)


@given(seeds)
@few
def test_sequences_that_are_reversed_along_the_rows(seed: int) -> None:
    chance = Chance(seed)
    inputs = [chance.numbers((2, chance.rows)), np.array([chance.rows, 1], np.int64)]
    call = raw("ReverseSequence", seq_dim=1, batch_dim=0)
    run(
        Case(call, inputs, []), [Shard(1, chance.rows), REPLICATE], chance
    ).assert_equal()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "op", ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"]
)
@given(seeds)
@few
def test_batch_normalization(op: str, training: bool, seed: int) -> None:
    """In training it needs the statistics of all rows."""
    chance = Chance(seed)
    shard = chance.shard(0)
    values = chance.numbers((shard.size, 2, 2, 3))
    inputs = [
        values,
        *(chance.numbers((3,), np.float32, 1, 2) for _ in range(2)),
        *(chance.numbers((3,), np.float32, 1, 2) for _ in range(2)),
    ]
    if training:
        inputs[3:] = [np.zeros((0,), np.float32)] * 2

    def call(*given_: Any) -> Any:
        return tuple(raw(op, is_training=training)(*given_))[:3]

    case = Case(call, inputs, [])
    found = run(case, [shard, *[REPLICATE] * 4], chance)
    assert_close(found, ULPS)
    if not training:
        assert found.outputs == [shard, REPLICATE, REPLICATE]
        assert not found.computed_whole


@pytest.mark.parametrize("op", ["Softmax", "FFT", "Cholesky"])
@pytest.mark.parametrize("placement", [SUM, Partial("max")])
@given(seeds)
@few
def test_terms_are_added_up_first(op: str, placement: Partial, seed: int) -> None:
    chance = Chance(seed)
    if op == "FFT":
        placement = SUM  # Complex numbers have no largest.
    values, _ = ONE_INPUT[op][1](chance)
    assert_close(run(Case(raw(op), [values], []), [placement], chance), 512)


@pytest.mark.parametrize("op", ["GRUBlockCell", "LSTMBlockCell"])
@given(seeds)
@few
def test_a_step_of_a_recurrent_network(op: str, seed: int) -> None:
    units = 3

    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        rows = shard.size
        lstm = op.startswith("LSTM")
        shapes = [(2 + units, 4 * units), (units,), (units,), (units,), (4 * units,)]
        if not lstm:
            shapes = [
                (2 + units, 2 * units),
                (2 + units, units),
                (2 * units,),
                (units,),
            ]
        states = [(rows, 2)] + [(rows, units)] * (2 if lstm else 1)
        inputs = [chance.numbers(shape, np.float32) for shape in (*states, *shapes)]
        plain = [shard] * len(states) + [REPLICATE] * len(shapes)
        return Case(raw(op), inputs, plain, 16)

    check(make, seed)

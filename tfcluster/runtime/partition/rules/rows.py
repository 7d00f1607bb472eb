"""Ops that treat rows alike, each by itself: the last dimensions belong to an op."""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.placement import REPLICATE, SUM, Placement
from tfcluster.runtime.partition.rules.table import (
    LocalPlan,
    PlacedOp,
    Whole,
    by_rows,
    require,
    rule,
)


def _outer_dimensions(op: PlacedOp, own: int) -> LocalPlan:
    """The op works on the last ``own`` dimensions of its first input.

    Outputs have the same outer dimensions, or are empty because nobody asked for them.
    """
    shard, shape = op.shard(), op.shape()
    require(shard.dim < len(shape) - own)
    outputs: list[Placement] = []
    for index in range(len(op.outputs)):
        output = op.output_shape(index)
        if shard.dim < len(output) and output[shard.dim] == shard.size:
            outputs.append(shard)
        elif elements_of(output) == 0:
            outputs.append(REPLICATE)
        else:
            raise Whole
    return LocalPlan(op.want([0], shard), outputs)


@rule(
    *("AdjustHue", "AdjustSaturation", "FFT", "HSVToRGB", "IFFT", "IRFFT", "LRN"),
    *("LogSoftmax", "MatrixDiag", "NthElement", "RFFT", "RGBToHSV", "Softmax"),
    "TopKV2",
)
def on_vectors(op: PlacedOp) -> LocalPlan:
    """The colours of a pixel are a vector."""
    return _outer_dimensions(op, 1)


@rule(
    *("Cholesky", "Eig", "FFT2D", "IFFT2D", "IRFFT2D", "LogMatrixDeterminant", "Lu"),
    *("MatrixBandPart", "MatrixDeterminant", "MatrixDiagPart", "MatrixDiagPartV2"),
    *("MatrixDiagPartV3", "MatrixInverse", "MatrixLogarithm"),
    *("MatrixSquareRoot", "Qr", "RFFT2D", "SelfAdjointEigV2", "Svd"),
)
def on_matrices(op: PlacedOp) -> LocalPlan:
    return _outer_dimensions(op, 2)


@rule("AdjustContrastv2", "FFT3D", "IFFT3D", "IRFFT3D", "RFFT3D")
def on_cubes(op: PlacedOp) -> LocalPlan:
    return _outer_dimensions(op, 3)


@rule("MatrixDiagV2", "MatrixDiagV3")
def matrix_diagonals(op: PlacedOp) -> LocalPlan:
    """One diagonal is a vector, and a band of diagonals is a matrix."""
    band = op.constant(1)
    return _outer_dimensions(op, 1 if len(set(band.reshape(-1))) == 1 else 2)


@rule("UnravelIndex")
def unravel_index(op: PlacedOp) -> LocalPlan:
    """The coordinates of an index are a column of the output."""
    shard = op.shard()
    return LocalPlan([shard, REPLICATE], [shard.at(1)])


def _stacks(op: PlacedOp, inputs: Sequence[int], own: int) -> LocalPlan:
    """Each input, and each output, has ``own`` dimensions beside the outer ones."""
    outer = [op.shape(index)[: len(op.shape(index)) - own] for index in inputs]
    require(all(shape == outer[0] for shape in outer))
    return op.alike(inputs, len(outer[0]))


@rule("Cross", "IsotonicRegression")
def on_stacks_of_vectors(op: PlacedOp) -> LocalPlan:
    return _stacks(op, range(len(op.inputs)), 1)


@rule(
    *("BandedTriangularSolve", "CholeskyGrad", "MatrixSolve", "MatrixTriangularSolve"),
    *("TridiagonalMatMul", "TridiagonalSolve"),
)
def on_stacks_of_matrices(op: PlacedOp) -> LocalPlan:
    return _stacks(op, range(len(op.inputs)), 2)


@rule("MatrixSolveLs")
def solve_least_squares(op: PlacedOp) -> LocalPlan:
    """The last input is a number."""
    return _stacks(op, [0, 1], 2)


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def set_diagonals(op: PlacedOp) -> LocalPlan:
    """A matrix and one or several diagonals, with the same outer dimensions."""
    return op.alike([0, 1], len(op.shape(0)) - 2)


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(op: PlacedOp) -> LocalPlan:
    """Logits and labels have the same rows, unless one of them is broadcast."""
    first, second = op.shape(0), op.shape(1)
    require(first[0] == second[0])
    return op.alike([0, 1], 1)


# In the latter two, each row of the second input is looked up in that of the first.
rule("InTopK", "InTopKV2", "LowerBound", "UpperBound")(by_rows(0, 1))
# A step of a recurrent network: the input and the states have rows, not the weights.
rule("GRUBlockCell")(by_rows(0, 1))
rule("LSTMBlockCell")(by_rows(0, 1, 2))


@rule("ReverseSequence")
def reverse_sequence(op: PlacedOp) -> LocalPlan:
    """The lengths belong to the entries of one dimension; another is reversed."""
    shard = op.shard()
    require(op.attribute("seq_dim") != shard.dim)
    has_lengths = op.attribute("batch_dim") == shard.dim
    return LocalPlan([shard, shard.at(0) if has_lengths else REPLICATE], [shard])


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(op: PlacedOp) -> LocalPlan:
    """Without training, the statistics are inputs."""
    shard = op.shard()
    require(shard.dim == 0 and not op.attribute("is_training"))
    rest: list[Placement] = [REPLICATE] * (len(op.outputs) - 1)
    return LocalPlan(op.want([0], shard), [shard, *rest])


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_batch_norm_gradient(op: PlacedOp) -> LocalPlan:
    """Without training, the statistics do not depend on the rows."""
    shard = op.first_shard([0, 1])
    require(shard.dim == 0 and not op.attribute("is_training"))
    rest: list[Placement] = [REPLICATE] * (len(op.outputs) - 3)
    return LocalPlan(op.want([0, 1], shard), [shard, SUM, SUM, *rest])

"""Ops that treat rows alike, each by itself: the last dimensions belong to an op."""

from __future__ import annotations

from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.placement import REPLICATE, Placement
from tfcluster.runtime.partition.rules.table import Operation, Plan, rule


def _outer_dimensions(op: Operation, own: int) -> Plan | None:
    """The op works on the last ``own`` dimensions of its first input.

    Outputs have the same outer dimensions, or are empty because nobody asked for them.
    """
    shard, shape = op.shard(), op.shape()
    if shard is None or shape is None or shard.dim >= len(shape) - own:
        return None
    outputs: list[Placement] = []
    for index in range(len(op.outputs)):
        output = op.output_shape(index)
        if output is None:
            return None
        if shard.dim < len(output) and output[shard.dim] == shard.size:
            outputs.append(shard)
        elif elements_of(output) == 0:
            outputs.append(REPLICATE)
        else:
            return None
    return Plan(op.wants(i0=shard), outputs)


@rule(
    *("AdjustHue", "AdjustSaturation", "FFT", "HSVToRGB", "IFFT", "IRFFT", "LRN"),
    *("LogSoftmax", "MatrixDiag", "NthElement", "RFFT", "RGBToHSV", "Softmax"),
    "TopKV2",
)
def on_vectors(op: Operation) -> Plan | None:
    """The colours of a pixel are a vector."""
    return _outer_dimensions(op, 1)


@rule(
    *("Cholesky", "Eig", "FFT2D", "IFFT2D", "IRFFT2D", "LogMatrixDeterminant", "Lu"),
    *("MatrixBandPart", "MatrixDeterminant", "MatrixDiagPart", "MatrixDiagPartV2"),
    *("MatrixDiagPartV3", "MatrixInverse", "MatrixLogarithm"),
    *("MatrixSquareRoot", "Qr", "RFFT2D", "SelfAdjointEigV2", "Svd"),
)
def on_matrices(op: Operation) -> Plan | None:
    return _outer_dimensions(op, 2)


@rule("AdjustContrastv2", "FFT3D", "IFFT3D", "IRFFT3D", "RFFT3D")
def on_cubes(op: Operation) -> Plan | None:
    return _outer_dimensions(op, 3)


@rule("MatrixDiagV2", "MatrixDiagV3")
def matrix_diagonals(op: Operation) -> Plan | None:
    """One diagonal is a vector, and a band of diagonals is a matrix."""
    band = op.constant(1)
    if band is None:
        return None
    return _outer_dimensions(op, 1 if len(set(band.reshape(-1))) == 1 else 2)


@rule("UnravelIndex")
def unravel_index(op: Operation) -> Plan | None:
    """The coordinates of an index are a column of the output."""
    shard = op.shard()
    return None if shard is None else Plan([shard, REPLICATE], [shard.at(1)])


@rule("CholeskyGrad", "MatrixSolve", "MatrixTriangularSolve")
def on_two_stacks(op: Operation) -> Plan | None:
    """Both inputs are stacks of matrices, with the same outer dimensions."""
    first, second = op.shape(0), op.shape(1)
    if first is None or second is None or first[:-2] != second[:-2]:
        return None
    return _two_stacks(op, len(first) - 2)


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def set_diagonals(op: Operation) -> Plan | None:
    """A matrix and one or several diagonals, with the same outer dimensions."""
    first = op.shape(0)
    return None if first is None else _two_stacks(op, len(first) - 2)


def _two_stacks(op: Operation, outer: int) -> Plan | None:
    shard = op.first_shard([0, 1])
    if shard is None or shard.dim >= outer:
        return None
    return Plan(op.want([0, 1], shard), [shard])


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Operation) -> Plan | None:
    """Logits and labels have the same rows, unless one of them is broadcast."""
    shard = op.first_shard()
    if shard is None or shard.dim != 0:
        return None
    for index in (0, 1):
        shape = op.shape(index)
        if shape is None or shape[0] != shard.size:
            return None
    return Plan([shard, shard], [shard, shard])


@rule("InTopK", "InTopKV2")
def in_top_k(op: Operation) -> Plan | None:
    shard = op.first_shard([0, 1])
    if shard is None or shard.dim != 0:
        return None
    return Plan(op.want([0, 1], shard), [shard])


@rule("LowerBound", "UpperBound")
def search(op: Operation) -> Plan | None:
    """Each row of the second input is looked up in the same row of the first."""
    shard = op.first_shard([0, 1])
    if shard is None or shard.dim != 0:
        return None
    return Plan([shard, shard], [shard])


@rule("ReverseSequence")
def reverse_sequence(op: Operation) -> Plan | None:
    """The lengths belong to the entries of one dimension; another is reversed."""
    shard = op.shard()
    if shard is None or op.attribute("seq_dim") == shard.dim:
        return None
    has_lengths = op.attribute("batch_dim") == shard.dim
    return Plan([shard, shard.at(0) if has_lengths else REPLICATE], [shard])


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(op: Operation) -> Plan | None:
    """Without training, the statistics are inputs."""
    shard = op.shard()
    if shard is None or shard.dim != 0 or op.attribute("is_training"):
        return None
    rest: list[Placement] = [REPLICATE] * (len(op.outputs) - 1)
    return Plan(op.wants(i0=shard), [shard, *rest])

"""Ops that treat rows alike, each by itself: the last dimensions belong to an op."""

from __future__ import annotations

from tfcluster.runtime.partition.placement import REPLICATE
from tfcluster.runtime.partition.rules.table import Operation, Plan, rule


def _outer_dimensions(op: Operation, own: int) -> Plan | None:
    """The op works on the last ``own`` dimensions of its first input."""
    shard, shape = op.shard(), op.shape()
    if shard is None or shape is None or shard.dim >= len(shape) - own:
        return None
    return Plan(op.wants(i0=shard), [shard] * len(op.outputs))


@rule(
    *("Softmax", "LogSoftmax", "TopKV2", "TopK", "NthElement", "FFT", "IFFT"),
    *(
        "RFFT",
        "IRFFT",
        "LRN",
        "MatrixDiag",
        "MatrixDiagV2",
        "MatrixDiagV3",
        "UnravelIndex",
    ),
)
def on_vectors(op: Operation) -> Plan | None:
    return _outer_dimensions(op, 1)


@rule(
    *("MatrixBandPart", "Cholesky", "MatrixInverse", "MatrixDeterminant", "Svd"),
    *("LogMatrixDeterminant", "Qr", "SelfAdjointEigV2", "Eig", "Lu", "FFT2D"),
    *("IFFT2D", "RFFT2D", "IRFFT2D", "MatrixDiagPart", "MatrixDiagPartV2"),
    *("MatrixDiagPartV3", "MatrixLogarithm", "MatrixSquareRoot", "MatrixExponential"),
    *("HSVToRGB", "RGBToHSV", "AdjustContrastv2"),
)
def on_matrices(op: Operation) -> Plan | None:
    return _outer_dimensions(op, 3 if op.type == "AdjustContrastv2" else 2)


@rule("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D")
def on_cubes(op: Operation) -> Plan | None:
    return _outer_dimensions(op, 3)


@rule("AdjustHue", "AdjustSaturation")
def on_colours(op: Operation) -> Plan | None:
    return _outer_dimensions(op, 1)


@rule("MatrixSolve", "MatrixTriangularSolve", "CholeskyGrad", "MatrixSetDiagV3")
def on_two_stacks(op: Operation) -> Plan | None:
    """Both inputs are stacks of matrices, with the same outer dimensions."""
    shard = op.first_shard([0, 1])
    first, second = op.shape(0), op.shape(1)
    if shard is None or first is None or second is None:
        return None
    if op.type == "MatrixSetDiagV3":
        if len(first) != len(second) + 1 or shard.dim >= len(second) - 1:
            return None
    elif first[:-2] != second[:-2] or shard.dim >= len(first) - 2:
        return None
    return Plan(op.want([0, 1], shard), [shard])


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Operation) -> Plan | None:
    shard = op.first_shard()
    shapes = op.shape(0), op.shape(1)
    if shard is None or shard.dim != 0 or None in shapes:
        return None
    first, second = shapes
    assert first is not None
    assert second is not None
    if first[0] != second[0]:
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
    shard = op.first_shard([0])
    if shard is None or op.attribute("batch_dim") != shard.dim:
        return None
    return Plan([shard, shard.at(0)], [shard])


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(op: Operation) -> Plan | None:
    """Without training, the statistics are inputs."""
    shard = op.shard()
    if shard is None or shard.dim != 0 or op.attribute("is_training"):
        return None
    rest = [REPLICATE] * (len(op.outputs) - 1)
    return Plan(op.wants(i0=shard), [shard, *rest])

"""Random numbers: every rank draws those of the whole batch, and takes its rows'.

An op whose kernel has a state (``tf.random.normal``) is written as a stateless op that
gets the same counter, so that programs for batches of other sizes continue its
sequence. See ``GuardedPhiloxRandom`` in TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.graph import Node, sizes_of
from tfcluster.runtime.partition.placement import REPLICATE, Shard
from tfcluster.runtime.partition.rules.table import LocalOps, LocalPlan
from tfcluster.runtime.partition.writer import Ref

STATEFUL = {
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "RandomGamma": "StatelessRandomGammaV3",
}
"""The ops with a state that draw the numbers of a stateless one."""
OWN_STATE = frozenset(
    (
        *("Multinomial", "RandomPoisson", "RandomPoissonV2", "RandomShuffle"),
        *("ParameterizedTruncatedNormal", "RandomCrop", "SampleDistortedBoundingBox"),
        *("SampleDistortedBoundingBoxV2", "FractionalMaxPool", "FractionalAvgPool"),
        *("UniformCandidateSampler", "LogUniformCandidateSampler"),
        *("FixedUnigramCandidateSampler", "LearnedUnigramCandidateSampler"),
        *("ThreadUnsafeUnigramCandidateSampler", "AllCandidateSampler"),
    )
)
"""Other ops with a state in their kernel."""
WITH_STATE = OWN_STATE | STATEFUL.keys()
"""All ops whose kernels draw numbers from a state."""
_STATELESS = frozenset(
    (
        *("StatelessRandomUniform", "StatelessRandomNormal"),
        *("StatelessTruncatedNormal", "StatelessRandomUniformInt"),
        *("StatelessRandomUniformFullInt", "StatelessRandomUniformV2"),
        *("StatelessRandomNormalV2", "StatelessTruncatedNormalV2"),
        *("StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2"),
        *("StatelessRandomGammaV2", "StatelessRandomGammaV3"),
        *("StatelessRandomPoisson", "StatelessRandomBinomial"),
        *("StatelessParameterizedTruncatedNormal", "StatelessMultinomial"),
    )
)


def is_stateful_draw(node: Node) -> bool:
    """Whether the op draws from a state of its own, and has no other effect."""
    return node.type in WITH_STATE


def is_draw(op_type: str) -> bool:
    """Whether the op draws random numbers, of which the rows' can be taken."""
    return op_type in WITH_STATE or op_type in _STATELESS


def by_rows(node: Node, rows: int | None) -> LocalPlan | None:
    """A plan for random numbers that has as many as the batch has rows."""
    if node.type not in _STATELESS and not is_stateful_draw(node):
        return None
    if rows is None or len(node.outputs) != 1:
        return None
    shape = node.outputs[0].shape
    if not shape or shape[0] != rows:
        return None
    want = [REPLICATE] * len(node.inputs)
    if _can_skip(node):
        return LocalPlan(want, [Shard(0, rows)], _own_numbers)
    return LocalPlan(want, [Shard(0, rows)], built=[REPLICATE])


# --- numbers of some rows -------------------------------------------------------------

_SKIPS = {
    "StatelessRandomUniformV2": 1,
    "StatelessRandomNormalV2": 1,
    "StatelessTruncatedNormalV2": 256,
}
"""How many counts of the Philox generator a group of four numbers takes.

A group of numbers of 8 bytes has two. Of those that are drawn until they fit, it takes
half as many counts.
"""
_SKIPS_IN_XLA = "StatelessRandomUniformV2", tf.float32
_PHILOX, _AUTO = 1, 3


def _can_skip(node: Node) -> bool:
    """Whether the numbers of some rows can be drawn without those before.

    On CPUs and GPUs, TensorFlow then chooses the Philox generator by itself, too. XLA
    makes other numbers of the generator's: those of a normal distribution depend on how
    many there are.
    """
    if node.type not in _SKIPS or sizes_of(node.outputs[0].shape) is None:
        return False
    if node.for_xla and (node.type, node.outputs[0].dtype) != _SKIPS_IN_XLA:
        return False
    algorithm = node.inputs[3].constant
    return algorithm is not None and int(algorithm) in (_PHILOX, _AUTO)


def _own_numbers(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    """Numbers from the group on in which those of this rank begin."""
    shape, key, counter, algorithm = inputs
    sizes, dtype = sizes_of(node.outputs[0].shape), node.outputs[0].dtype
    assert sizes is not None
    width = math.prod(sizes[1:])
    first, count = (n(sizes[0]) * width for n in (local.split.first, local.split.count))
    in_group, skip = 4, _SKIPS[node.type]
    if dtype.size == 8:
        in_group, skip = 2, max(1, skip // 2)
    before = first % in_group
    counter = _added(local, counter, first // in_group * skip)
    sizes_dtype = shape.dtype.as_numpy_dtype
    drawn = local.constant(np.array([before + count], sizes_dtype))
    numbers = local.repeat(node, [drawn, key, counter, algorithm])[0]
    bounds = [local.constant(np.array([n], np.int64)) for n in (before, count)]
    own = local.op("Slice", [numbers, *bounds])[0]
    local_sizes = (local.split.count(sizes[0]), *sizes[1:])
    return local.op("Reshape", [own, local.constant(np.array(local_sizes, np.int64))])


def _added(local: LocalOps, counter: Ref, count: int) -> Ref:
    """A counter of 128 bits, in two numbers of which the lower one comes first."""
    if count == 0:
        return counter
    added = local.constant(np.array([count, 0], np.uint64))
    total = local.op("AddV2", [counter, added])[0]
    # The lower number has passed its largest value if it is now smaller.
    passed = local.op("Cast", [local.op("Less", [total, counter])[0]], DstT=tf.uint64)[
        0
    ]
    axis, one = (local.constant(np.array(n, np.int32)) for n in (0, 1))
    carried = local.op("Roll", [passed, one, axis])[0]
    mask = local.constant(np.array([0, 1], np.uint64))
    carried = local.op("Mul", [carried, mask])[0]
    return local.op("AddV2", [total, carried])[0]

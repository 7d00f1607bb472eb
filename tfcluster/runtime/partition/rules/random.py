"""Random numbers: every rank draws those of the whole batch, and takes its rows'.

An op whose kernel has a state (``tf.random.normal``) is written as a stateless op that
gets the same counter, so that programs for batches of other sizes continue its
sequence. See ``GuardedPhiloxRandom`` in TensorFlow.
"""

from __future__ import annotations

from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import REPLICATE, Shard
from tfcluster.runtime.partition.rules.table import LocalPlan

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
    return LocalPlan(want, [Shard(0, rows)], built=[REPLICATE])

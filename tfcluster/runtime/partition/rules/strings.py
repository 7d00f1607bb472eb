"""Ops on strings and on tables of them, each string by itself."""

from __future__ import annotations

from tfcluster.runtime.partition.rules.elementwise import elementwise
from tfcluster.runtime.partition.rules.table import (
    LocalPlan,
    PlacedOp,
    by_rows,
    require,
    rule,
)

RAGGED_ROWS = "tfcluster_ragged_rows"
"""The beginning of the names of functions that make a row of each string."""

# Several inputs are broadcast to one shape.
ELEMENTWISE_OF_STRINGS = (
    *("AsString", "DecodeBase64", "EncodeBase64", "StaticRegexFullMatch"),
    *("StaticRegexReplace", "StringLength", "StringLower", "StringStrip"),
    *("StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
    *("StringToNumber", "StringUpper", "UnicodeScript", "UnicodeTranscode"),
    *("Substr", "StringJoin", "DecodeCompressed"),
)
rule(*ELEMENTWISE_OF_STRINGS)(elementwise)


@rule("PartitionedCall")
def rows_of_strings(op: PlacedOp) -> LocalPlan:
    """A call of a function that ``ragged_rows`` has made."""
    require(op.attribute("f").name.startswith(RAGGED_ROWS))
    return op.alike([0])


@rule("RegexFullMatch", "RegexReplace", "DecodePaddedRaw", "DecodeCSV")
def first_input(op: PlacedOp) -> LocalPlan:
    """Other inputs are whole; numbers in a string become a dimension at the end."""
    return op.alike([0])


@rule("ReduceJoin")
def join(op: PlacedOp) -> LocalPlan:
    """Strings are joined in order, so along the rows by everyone."""
    shape, shard, axes = op.shape(), op.shard(), op.constant(1)
    dropped = {int(axis) % len(shape) for axis in axes.reshape(-1)}
    require(bool(dropped) and shard.dim not in dropped)
    before = 0 if op.attribute("keep_dims") else sum(a < shard.dim for a in dropped)
    return LocalPlan(op.want([0], shard), [shard.at(shard.dim - before)])


@rule("LookupTableFind", "LookupTableFindV2")
def look_up(op: PlacedOp) -> LocalPlan:
    """Keys and values may be vectors, in further dimensions."""
    shard, keys, values = op.shard(1), op.shape(1), op.output_shape()
    require(shard.dim < min(len(keys), len(values)))
    require(keys[: shard.dim + 1] == values[: shard.dim + 1])
    return LocalPlan(op.want([1], shard), [shard])


# A fingerprint of each entry of dimension 0.
rule("Fingerprint")(by_rows(0))


@rule("ParseExampleV2")
def parse_examples(op: PlacedOp) -> LocalPlan:
    """Each example by itself, if no feature has as many values as it likes."""
    shape = op.shape()
    require(len(shape) == 1)
    require(not op.attribute("num_sparse") and not op.attribute("ragged_value_types"))
    has_names = op.elements(1) != 0
    return op.alike([0, 1] if has_names else [0])

"""Ops on strings and on tables of them, each string by itself."""

from __future__ import annotations

from tfcluster.runtime.partition.rules.elementwise import elementwise
from tfcluster.runtime.partition.rules.table import Operation, Plan, by_rows, rule


@rule(
    *("AsString", "DecodeBase64", "EncodeBase64", "StaticRegexFullMatch"),
    *("StaticRegexReplace", "StringLength", "StringLower", "StringStrip"),
    *("StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
    *("StringToNumber", "StringUpper", "UnicodeScript", "UnicodeTranscode"),
    *("Substr", "StringJoin", "DecodeCompressed"),
)
def each_string(op: Operation) -> Plan | None:
    """Several inputs are broadcast to one shape."""
    return elementwise(op)


@rule("RegexFullMatch", "RegexReplace", "DecodePaddedRaw", "DecodeCSV")
def first_input(op: Operation) -> Plan | None:
    """Other inputs are whole; numbers in a string become a dimension at the end."""
    return op.alike([0])


@rule("ReduceJoin")
def join(op: Operation) -> Plan | None:
    """Strings are joined in order, so along the rows by everyone."""
    shape, shard, axes = op.shape(), op.shard(), op.constant(1)
    dropped = {int(axis) % len(shape) for axis in axes.reshape(-1)}
    if shard.dim in dropped or not dropped:
        return None
    before = 0 if op.attribute("keep_dims") else sum(a < shard.dim for a in dropped)
    return Plan(op.wants(i0=shard), [shard.at(shard.dim - before)])


@rule("LookupTableFind", "LookupTableFindV2")
def look_up(op: Operation) -> Plan | None:
    """Keys and values may be vectors, in further dimensions."""
    shard, keys, values = op.shard(1), op.shape(1), op.output_shape()
    if shard.dim >= min(len(keys), len(values)):
        return None
    if keys[: shard.dim + 1] != values[: shard.dim + 1]:
        return None
    return Plan(op.wants(i1=shard), [shard])


# A fingerprint of each entry of dimension 0.
rule("Fingerprint")(by_rows(0))


@rule("ParseExampleV2")
def parse_examples(op: Operation) -> Plan | None:
    """Each example by itself, if no feature has as many values as it likes."""
    shape = op.shape()
    if len(shape) != 1:
        return None
    if op.attribute("num_sparse") or op.attribute("ragged_value_types"):
        return None
    has_names = op.elements(1) != 0
    return op.alike([0, 1] if has_names else [0])

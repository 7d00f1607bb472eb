"""Ops on strings and on tables of them, each string by itself."""

from __future__ import annotations

from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.placement import REPLICATE
from tfcluster.runtime.partition.rules.elementwise import elementwise
from tfcluster.runtime.partition.rules.table import Operation, Plan, rule


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


@rule("RegexFullMatch", "RegexReplace")
def regular_expression(op: Operation) -> Plan | None:
    """The expression is whole."""
    return _first(op)


@rule("DecodePaddedRaw")
def decode(op: Operation) -> Plan | None:
    """The numbers of each string become a dimension at the end."""
    return _first(op)


@rule("DecodeCSV")
def decode_csv(op: Operation) -> Plan | None:
    return _first(op)


@rule("ReduceJoin")
def join(op: Operation) -> Plan | None:
    """Strings are joined in order, so along the rows by everyone."""
    shape, shard, axes = op.shape(), op.shard(), op.constant(1)
    if shape is None or shard is None or axes is None:
        return None
    dropped = {int(axis) % len(shape) for axis in axes.reshape(-1)}
    if shard.dim in dropped or not dropped:
        return None
    before = 0 if op.attribute("keep_dims") else sum(a < shard.dim for a in dropped)
    return Plan(op.wants(i0=shard), [shard.at(shard.dim - before)])


@rule("LookupTableFind", "LookupTableFindV2")
def look_up(op: Operation) -> Plan | None:
    """Keys and values may be vectors, in further dimensions."""
    shard, keys, values = op.shard(1), op.shape(1), op.output_shape()
    if shard is None or keys is None or values is None:
        return None
    if shard.dim >= min(len(keys), len(values)):
        return None
    if keys[: shard.dim + 1] != values[: shard.dim + 1]:
        return None
    return Plan(op.wants(i1=shard), [shard])


@rule("Fingerprint")
def fingerprint(op: Operation) -> Plan | None:
    """A fingerprint of each entry of the first dimension."""
    shard = op.shard()
    if shard is None or shard.dim != 0:
        return None
    return Plan([shard, REPLICATE], [shard])


@rule("ParseExampleV2")
def parse_examples(op: Operation) -> Plan | None:
    """Each example by itself, if no feature has as many values as it likes."""
    shard, shape = op.shard(), op.shape()
    if shard is None or shape is None or len(shape) != 1:
        return None
    if op.attribute("num_sparse") or op.attribute("ragged_value_types"):
        return None
    has_names = elements_of(op.shape(1)) != 0
    want = op.want([0, 1] if has_names else [0], shard)
    return Plan(want, [shard] * len(op.outputs))


def _first(op: Operation) -> Plan | None:
    shard = op.shard()
    if shard is None:
        return None
    return Plan(op.wants(i0=shard), [shard] * len(op.outputs))

"""Rules of ops on strings and on tables of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    Array,
    Case,
    Chance,
    check,
    few,
    ops_of,
    raw,
    seeds,
)
from tfcluster.runtime.partition.placement import REPLICATE
from tfcluster.runtime.partition.rules import strings

WORDS = (b"a", b"Bc", b" x ", b"", b"12", b"\xc3\xa4")
NUMBERS = (b"1", b"-2", b"3.5")
UNARY: dict[str, dict[str, Any]] = {
    "EncodeBase64": {},
    "StaticRegexFullMatch": {"pattern": "[a-z]"},
    "StaticRegexReplace": {"pattern": "[a-z]", "rewrite": "_"},
    "StringLength": {},
    "StringLower": {},
    "StringStrip": {},
    "StringToHashBucket": {"num_buckets": 7},
    "StringToHashBucketFast": {"num_buckets": 7},
    "StringToHashBucketStrong": {"num_buckets": 7, "key": [1, 2]},
    "StringUpper": {},
    "UnicodeTranscode": {"input_encoding": "UTF-8", "output_encoding": "UTF-16-BE"},
}
OTHERS = {
    *("AsString", "DecodeBase64", "DecodeCSV", "DecodeCompressed", "Fingerprint"),
    *("DecodePaddedRaw", "LookupTableFind", "LookupTableFindV2"),
    *("ParseExampleV2", "PartitionedCall", "ReduceJoin", "RegexFullMatch"),
    "RegexReplace",
    *("StringJoin", "StringToNumber", "Substr", "UnicodeScript"),
}


def test_every_op_has_a_case() -> None:
    assert {*UNARY, *OTHERS} == ops_of(strings)


def _of(chance: Chance, shape: Sequence[int], words: Sequence[bytes] = WORDS) -> Array:
    return chance.random.choice(np.array(words, object), shape)


def _check_first(
    seed: int,
    call: Callable[..., Any],
    words: Sequence[bytes] = WORDS,
    whole: Sequence[Array] = (),
    outer: tuple[int, int] = (0, 1),
) -> None:
    """The first input is divided, others are whole."""

    def make(chance: Chance) -> Case:
        shape, shard = chance.batch(outer)
        inputs = [_of(chance, shape, words), *whole]
        return Case(call, inputs, [shard, *[REPLICATE] * len(whole)], 0)

    check(make, seed)


@pytest.mark.parametrize("op", UNARY)
@given(seeds)
@few
def test_of_one_string(op: str, seed: int) -> None:
    _check_first(seed, raw(op, **UNARY[op]))


@given(seeds)
@few
def test_decoded(seed: int) -> None:
    _check_first(seed, raw("StringToNumber", out_type=tf.float32), NUMBERS)
    _check_first(seed, raw("DecodeBase64"), (b"YQ", b"YWI", b""))
    _check_first(seed, raw("DecodeCompressed", compression_type=""))
    length = np.array(4, np.int32)
    call = raw("DecodePaddedRaw", out_type=tf.uint8, little_endian=True)
    _check_first(seed, call, whole=[length])


@given(seeds)
@few
def test_regular_expressions(seed: int) -> None:
    pattern, rewrite = np.array(b"[a-z]", object), np.array(b"_", object)
    _check_first(seed, raw("RegexFullMatch"), whole=[pattern])
    _check_first(
        seed, raw("RegexReplace", replace_global=True), whole=[pattern, rewrite]
    )


@given(seeds)
@few
def test_table_of_csv(seed: int) -> None:
    def decode(records: Any) -> Any:
        defaults = [tf.constant([0.0]), tf.constant([b""])]
        return tf.raw_ops.DecodeCSV(records=records, record_defaults=defaults)

    _check_first(seed, decode, (b"1.5,a", b"2,b", b",c"))


@given(seeds)
@few
def test_several_strings(seed: int) -> None:
    def joined(chance: Chance) -> Case:
        shape, shard = chance.batch((0, 1))
        scalar = _of(chance, ())
        return Case(
            lambda a, b, c: tf.raw_ops.StringJoin(inputs=[a, b, c], separator="-"),
            [_of(chance, shape), _of(chance, shape), scalar],
            [shard, shard, REPLICATE],
            0,
        )

    def part(chance: Chance) -> Case:
        shape, shard = chance.batch((0, 1))
        position = chance.random.integers(0, 2, shape).astype(np.int32)
        return Case(
            raw("Substr"),
            [_of(chance, shape, (b"abcd", b"xyz")), position, position],
            [shard, shard, shard],
            0,
        )

    def reduced(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 2))
        axes = [dim for dim in range(len(shape)) if dim != shard.dim][:1]
        keeps = chance.yes()
        join = raw("ReduceJoin", keep_dims=keeps, separator="+")
        return Case(lambda x: join(x, axes), [_of(chance, shape)], [shard], 0)

    for make in (joined, part, reduced):
        check(make, seed)


@given(seeds)
@few
def test_numbers(seed: int) -> None:
    def text(chance: Chance) -> Case:
        shape, shard = chance.batch()
        dtype = chance.of((np.float32, np.int64, np.bool_))
        return Case(raw("AsString"), [chance.numbers(shape, dtype)], [shard], 0)

    def script(chance: Chance) -> Case:
        shape, shard = chance.batch()
        letters = chance.random.integers(60, 1000, shape).astype(np.int32)
        return Case(raw("UnicodeScript"), [letters], [shard], 0)

    def print_of_rows(chance: Chance) -> Case:
        shard = chance.shard(0)
        shape = (shard.size, *chance.dims(2))
        method = np.array(b"farmhash64", object)
        inputs = [chance.numbers(shape), method]
        return Case(raw("Fingerprint"), inputs, [shard, REPLICATE], 0)

    for make in (text, script, print_of_rows):
        check(make, seed)


@given(seeds)
@few
def test_tables(seed: int) -> None:
    keys = tf.constant([b"a", b"Bc", b"12"])
    initial = tf.lookup.KeyValueTensorInitializer(keys, tf.constant([4, 5, 6]))
    table = tf.lookup.StaticHashTable(initial, -1)
    _check_first(seed, table.lookup)
    vectors = tf.lookup.experimental.MutableHashTable(
        tf.string, tf.float32, tf.zeros(3)
    )
    vectors.insert(keys, tf.reshape(tf.range(9.0), (3, 3)))
    _check_first(seed, vectors.lookup)


@given(seeds)
@few
def test_examples(seed: int) -> None:
    feature = {"x": tf.io.FixedLenFeature((2,), tf.float32)}
    floats = tf.train.FloatList(value=[1.0, 2.0])
    message = tf.train.Example(
        features=tf.train.Features(feature={"x": tf.train.Feature(float_list=floats)})
    ).SerializeToString()
    _check_first(
        seed,
        lambda texts: tf.io.parse_example(texts, feature)["x"],
        (message,),
        outer=(0, 0),
    )

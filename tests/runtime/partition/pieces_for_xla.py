"""Functions that call pieces compute what they did before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfcluster.runtime.partition import pieces, tf_functions
from tfcluster.runtime.partition.pieces import divided, stages
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.writer import OpWriter, Ref

ECHO = HostFunction(lambda *arrays: list(arrays))
DTYPE = {"dtype": tf.float64}
SIZE = 3


def test_a_cut_ends_a_stage_for_what_follows_it() -> None:
    needs = {"a": [], "cut": ["a"], "b": ["a", "cut"], "beside": ["a"]}
    found = stages(needs, {"a", "b", "beside"}, set())
    assert [found[name][0] for name in needs] == [1, 1, 2, 1]


def test_cuts_with_nothing_between_them_count_once() -> None:
    needs = {"a": [], "one": ["a"], "two": ["one"], "b": ["two"], "c": ["b"]}
    found = stages(needs, {"a", "b", "c"}, set())
    assert [found[name][0] for name in "abc"] == [1, 2, 2]


def test_a_cut_before_all_work_counts_for_nothing() -> None:
    found = stages({"handle": [], "a": ["handle"], "b": []}, {"a", "b"}, set())
    assert found["a"] == found["b"]


def test_what_the_first_exchange_needs_is_apart() -> None:
    needs = {
        "loss": [],
        "last": ["loss"],
        "first": ["last"],
        "send": ["last"],
        "send_more": ["send", "first"],
        "update": ["send", "send_more"],
    }
    exchanges = {"send", "send_more"}
    found = stages(needs, needs.keys() - exchanges, exchanges)
    assert found["loss"] == found["last"] == (1, 0, 0)
    assert found["first"] == (1, 1, 0)
    assert found["update"] == (2, 2, 2)


def test_an_update_does_not_wait_for_exchanges_that_it_does_not_need() -> None:
    needs = {
        "state": [],
        "send": [],
        "send_more": ["send"],
        "update": ["state", "send"],
        "update_more": ["state", "send_more"],
    }
    exchanges = {"send", "send_more"}
    found = stages(needs, needs.keys() - exchanges, exchanges)
    assert found["state"] == found["update"] == (1, 2, 1)
    assert found["update_more"] == (1, 2, 2)


def test_what_no_exchange_needs_is_where_it_is_used() -> None:
    needs = {
        "state": [],
        "decayed": ["state"],
        "loss": [],
        "send": ["loss"],
        "update": ["decayed", "send"],
        "metric": ["loss"],
        "more": ["loss", "send"],
        "send_more": ["more"],
        "update_more": ["state", "send_more"],
    }
    exchanges = {"send", "send_more"}
    found = stages(needs, needs.keys() - exchanges, exchanges)
    # The first update does not wait for the second exchange.
    assert found["state"] == found["decayed"] == found["update"] < found["update_more"]
    assert found["metric"] < found["update"]


@pytest.mark.parametrize("apart", [False, True])
def test_a_list_is_handed_to_no_other_piece(apart: bool) -> None:
    writer = OpWriter("lists")
    rows = writer.argument(tf.float64, (SIZE, SIZE))
    sizes = writer.constant(np.array([SIZE], np.int32))
    handle = writer.op("TensorListFromTensor", [rows, sizes], {})[0]
    attributes = {"element_dtype": tf.float64, "num_elements": -1}
    read = rows
    if apart:
        read = writer.op("TensorListStack", [handle, sizes], attributes)[0]
        read = writer.ensure_shape(read, (SIZE, SIZE))
    squared = writer.op("MatMul", [read, rows], {})
    sent = writer.op("PyFunc", [squared], echo(), "send")[0]
    with writer.after([sent.node] if apart else []):
        stacked = writer.op("TensorListStack", [handle, sizes], attributes)[0]
    whole = writer.ensure_shape(stacked, (SIZE, SIZE))
    product = writer.op("MatMul", [whole, whole], {})[0]
    definition = writer.finish([product, sent], [])
    names = {node.name for node in definition.node_def if node.op != "PyFunc"}
    calling, found = divided(definition, names)
    ops = {node.op for piece in found for node in piece.nodes}
    assert ("TensorListStack" in ops) == (not apart)
    value = np.arange(SIZE * SIZE, dtype=float).reshape(SIZE, SIZE)
    name = registered(calling, found)
    result, _ = tf_functions.call(name, [tf.constant(value)], 2)
    np.testing.assert_array_equal(result.numpy(), value @ value)


def echo() -> dict[str, object]:
    return {"token": ECHO.token, "Tout": [tf.float64]}


def registered(calling: Any, found: Any) -> str:
    calling.signature.name = tf_functions.unique_name("in_pieces")
    for piece in found:
        tf_functions.register(piece.definition)
    tf_functions.register(calling)
    return str(calling.signature.name)


def made_up(draw: random.Random) -> tuple[Any, set[str]]:
    """A function of two vectors and two variables, and what may be compiled."""
    writer = OpWriter("made_up")
    values = [writer.argument(tf.float64, (SIZE,)) for _ in range(2)]
    handles = [writer.argument(tf.resource, ()) for _ in range(2)]
    last: dict[Ref, str] = {}
    sent = ""
    for _ in range(draw.randint(8, 24)):
        kind = draw.choice(["AddV2", "Sub", "Tanh", "PyFunc", "read", "assign", "wait"])
        value = draw.choice(values)
        handle = draw.choice(handles)
        if kind in ("AddV2", "Sub"):
            values += writer.op(kind, [value, draw.choice(values)], {})
        elif kind == "Tanh":
            values += writer.op(kind, [value], {})
        elif kind == "PyFunc":
            with writer.after([sent]):
                result = writer.op(kind, [[value]], echo(), "send")[0]
            sent = writer.last
            values.append(writer.ensure_shape(result, (SIZE,)))
        elif kind == "wait":
            with writer.after([sent, *last.values()]):
                array = np.full(SIZE, draw.random())
                proto = tf.make_tensor_proto(array)
                writer.node("Const", [], {"value": proto, **DTYPE}, "behind")
            with writer.after([writer.last]):
                values += writer.op("Neg", [value], {})
        else:
            with writer.after([last.get(handle, "")]):
                if kind == "read":
                    values += writer.op("ReadVariableOp", [handle], DTYPE)
                else:
                    writer.op("AssignAddVariableOp", [handle, value], DTYPE)
            last[handle] = writer.last
    definition = writer.finish(values[-4:], [*last.values(), *filter(None, [sent])])
    names = [node.name for node in definition.node_def if node.op != "PyFunc"]
    return definition, {name for name in names if draw.random() < 0.85}


def outcome(name: str, outputs: int) -> list[Any]:
    variables = [tf.Variable(np.arange(SIZE) + 0.25 * i) for i in range(2)]
    handles = [variable.handle for variable in variables]
    vectors = [tf.constant(np.arange(SIZE) * 0.5 - i) for i in range(2)]
    results = tf_functions.call(name, [*vectors, *handles], outputs)
    return [*results, *variables]


@pytest.mark.parametrize("seed", range(40))
def test_pieces_change_no_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cuts are tested here. XLA would need a minute for all of these functions.
    monkeypatch.setattr(pieces, "MUST_COMPILE", "_without_meaning")
    monkeypatch.setattr(pieces, "_LEAST_NODES", 1)
    definition, names = made_up(random.Random(seed))
    tf_functions.register(definition)
    calling, found = divided(definition, names)
    name = registered(calling, found)
    count = len(definition.signature.output_arg)
    expected = outcome(definition.signature.name, count)
    for one, other in zip(outcome(name, count), expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    held = {node.name for piece in found for node in piece.nodes}
    assert held <= names
    constants = {node.name for node in definition.node_def if node.op == "Const"}
    assert names - constants <= held

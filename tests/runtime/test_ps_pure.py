"""Placement on ps tasks, sharding, means and messages, without a ps task."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np
import pytest

from tfcluster.runtime.collective.transports.base import Slices
from tfcluster.runtime.net.buffer_pool import Pool
from tfcluster.runtime.parameter_server.messages import (
    MessageError,
    PsMessage,
    attach,
    create,
    offer,
    receive,
    send,
)
from tfcluster.runtime.parameter_server.service import gradients_of
from tfcluster.runtime.parameter_server.sharding import (
    ModelVariable,
    Placement,
    Pushed,
    Rows,
    Share,
    bytes_of,
    difference,
    differing,
    facts_of,
    joined,
    joined_slots,
    part_of,
    placed,
    pushed_part,
    whole_gradients,
)


def vgg16() -> list[ModelVariable]:
    """VGG16's variables: 138 M numbers, three quarters of them in one variable."""
    found, before = [], 3
    for number, after in enumerate(
        [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    ):
        found.append(
            ModelVariable(f"c{number}/kernel", "float32", (3, 3, before, after))
        )
        found.append(ModelVariable(f"c{number}/bias", "float32", (after,)))
        before = after
    for number, (rows, columns) in enumerate(
        [(25088, 4096), (4096, 4096), (4096, 1000)]
    ):
        found.append(ModelVariable(f"d{number}/kernel", "float32", (rows, columns)))
        found.append(ModelVariable(f"d{number}/bias", "float32", (columns,)))
    return found


def covered(variables: Sequence[ModelVariable], placement: Placement) -> bool:
    """Whether each row of each variable is on exactly one ps."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for pieces in placement:
        assert len({piece.variable for piece in pieces}) == len(pieces)
        for piece in pieces:
            rows.setdefault(piece.variable, []).append((piece.start, piece.end))
    for index, variable in enumerate(variables):
        end = 0
        for start, stop in sorted(rows[index]):
            assert start == end
            end = stop
        assert end == variable.rows
    return True


def loads_of(variables: Sequence[ModelVariable], placement: Placement) -> list[int]:
    """The bytes on each ps."""
    return [sum(bytes_of(variables, piece) for piece in pieces) for pieces in placement]


@pytest.mark.parametrize("servers", [2, 4])
def test_bytes_of_vgg16_are_even(servers: int) -> None:
    variables = vgg16()
    placement = placed(variables, servers, splittable=True)
    loads = loads_of(variables, placement)
    assert sum(loads) == 138_357_544 * 4
    assert max(loads) <= 1.1 * min(loads)
    assert covered(variables, placement)


def test_whole_variables_go_to_the_ps_with_the_fewest_bytes() -> None:
    variables = [ModelVariable(str(n), "float32", (n,)) for n in (3, 9, 4, 7, 5, 8)]
    placement = placed(variables, 3)
    assert loads_of(variables, placement) == [48, 48, 48]
    assert all(piece.whole for pieces in placement for piece in pieces)
    assert covered(variables, placement)


def test_together_all_is_on_the_first() -> None:
    first, second = placed(vgg16(), 2, splittable=True, together=True)
    assert len(first) == 32
    assert not second


VARIABLES = [
    ModelVariable("words/table", "float32", (100, 4), rows_only=True),
    ModelVariable("dense/bias", "float32", (3,)),
]


def test_pieces_make_the_whole_again() -> None:
    placement = placed(VARIABLES, 2, splittable=True)
    assert len(placement[0]) + len(placement[1]) == 3
    values = [np.arange(400, dtype="f4").reshape(100, 4), np.arange(3, dtype="f4")]
    parts = {}
    for ps, pieces in enumerate(placement):
        kinds, arrays = pushed_part(VARIABLES, pieces, values)
        parts[ps] = (pieces, kinds, arrays)
    for found, value in zip(joined(VARIABLES, parts), values, strict=True):
        np.testing.assert_array_equal(found, value)


def test_rows_go_where_they_live_and_come_back_under_their_numbers() -> None:
    placement = placed(VARIABLES, 2, splittable=True)
    slices = Slices(np.arange(12, dtype="f4").reshape(3, 4), np.array([99, 0, 99]))
    parts = {}
    for ps, pieces in enumerate(placement):
        kinds, arrays = pushed_part(VARIABLES, pieces, [slices, None])
        parts[ps] = (pieces, kinds, arrays)
    table, bias = joined(VARIABLES, parts)
    assert bias is None
    assert isinstance(table, Rows)
    whole, again = np.zeros((100, 4)), np.zeros((100, 4))
    np.add.at(whole, slices.indices, slices.values)
    np.add.at(again, table.indices, table.values)
    np.testing.assert_array_equal(whole, again)


def test_a_row_beyond_the_variable_is_an_error_that_names_it() -> None:
    ((piece, _),) = placed(VARIABLES, 1)
    slices = Slices(np.ones((1, 4), "f4"), np.array([100]))
    with pytest.raises(IndexError, match="words/table has rows beyond its 100"):
        pushed_part(VARIABLES, [piece], [slices, None])


def test_slots_of_split_variables_are_put_together_and_cut() -> None:
    placement = placed(VARIABLES, 2, splittable=True)
    whole = np.arange(400, dtype="f4").reshape(100, 4)
    parts = {}
    for ps, pieces in enumerate(placement):
        slots = {"adam/iteration": np.int64(ps)}
        place, part = part_of(VARIABLES, pieces, "adam/words_table_momentum", whole)
        assert place == "adam/words_table_momentum"
        parts[ps] = (pieces, {**slots, str(place): part})
    found = joined_slots(VARIABLES, parts)
    np.testing.assert_array_equal(found["adam/words_table_momentum"], whole)
    assert found["adam/iteration"] == 0


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_of_all_ranks_are_the_whole(count: int) -> None:
    dense = np.arange(6, dtype="f4").reshape(2, 3)
    scalar = np.array(2.5, "f4")
    slices = Slices(np.arange(10.0).reshape(5, 2), np.array([3, 1, 3, 0, 9]))
    arrays, kinds = [dense, slices.values, slices.indices, scalar], "ds-d"
    parts = [Share(rank, count).of(kinds, arrays) for rank in range(count)]
    assert sum(part[0].size for part in parts) == dense.size
    pushed = {
        rank: Pushed(kinds, gradients_of(kinds, part))
        for rank, part in reversed(list(enumerate(parts)))
    }
    found = whole_gradients(pushed, [(2, 3), (10, 2), (4,), ()])
    np.testing.assert_array_equal(found[0], dense)
    assert isinstance(found[1], Slices)
    np.testing.assert_array_equal(found[1].values, slices.values)
    np.testing.assert_array_equal(found[1].indices, slices.indices)
    assert found[2] is None
    assert isinstance(found[3], np.ndarray)
    assert found[3].shape == ()
    assert found[3] == 2.5


def test_an_empty_part_counts_for_nothing() -> None:
    given = [np.arange(4, dtype="f4")]
    pushed = {
        0: Pushed("d", gradients_of("d", Share(0, 1).of("d", given))),
        1: Pushed("d", gradients_of("d", Share(-1, 1).of("d", given))),
    }
    np.testing.assert_array_equal(whole_gradients(pushed, [(4,)])[0], given[0])


def test_unlike_gradients_are_told_apart() -> None:
    pushed = {0: Pushed("d-", []), 2: Pushed("ds", [])}
    assert difference(pushed) == "rank 0 has no gradient for piece 1, rank 2 has rows"


def test_differences_of_models_in_words() -> None:
    def facts(*variables: ModelVariable) -> dict[str, object]:
        switches = {"synchronous": False, "splittable": True, "together": False}
        return facts_of(variables, servers=2, **switches)

    theirs = facts(*VARIABLES, ModelVariable("more", "float32", ()))
    ours = facts(
        ModelVariable("words/tabel", "float32", (100, 4), rows_only=True),
        ModelVariable("dense/bias", "float32", (5,)),
        ModelVariable("more", "float32", ()),
    )
    assert differing(theirs, theirs, 1) is None
    assert differing(theirs, ours, 1) == (
        "the model of rank 1 differs: words/table is missing; words/tabel is not on "
        "the ps; dense/bias is float32[5], on the ps float32[3]"
    )


def test_messages_arrive_as_they_were() -> None:
    left, right = socket.socketpair()
    arrays = [
        np.arange(7, dtype="f4"),
        np.zeros((0, 3), "i8"),
        np.float64(2.5).reshape(()),
        np.arange(12, dtype="i4").reshape(3, 4).T,
    ]
    with left, right:
        send(left, PsMessage({"op": "x"}, arrays))
        found = receive(right, Pool(), {})
    assert found.header == {"op": "x"}
    for array, before in zip(found.arrays, arrays, strict=True):
        assert array.dtype == before.dtype
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff" + bytes(8),
        b"\0\0\0\2" + bytes(8) + b"[]",
        b"\0\0\0\1" + bytes(8) + b"{",
        b"\0\0\0\x1d" + bytes(8) + b'{"arrays":[["float32",[-9]]]}',
        b"\0\0\0\x1d" + bytes(8) + b'{"arrays":[["float32",[99]]]}',
        b"\0\0\0\x0c" + bytes(8) + b'{"buffer":7}',
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        with pytest.raises(MessageError):
            receive(right, Pool(), {})


def test_buffers_are_shared_and_known_to_be_in_use() -> None:
    sizes = [5000, 100]
    descriptor, ours = create(sizes)
    theirs = attach(offer(descriptor, ours, sizes))
    message = PsMessage({}, [np.arange(1000, dtype="f4")]).moved_to(ours[0], 0)
    np.testing.assert_array_equal(theirs[0][:4000].view("f4"), message.arrays[0])
    assert not ours.is_free(0)
    assert ours.is_free(1)
    del message
    assert ours.is_free(0)
    os.close(descriptor)


def test_other_memory_is_not_taken_for_ours() -> None:
    descriptor, ours = create([100])
    told = offer(descriptor, ours, [100])
    for wrong in ({"nonce": "00"}, {"sizes": [9000]}, {"descriptor": 0}):
        with pytest.raises(
            OSError, match=r"not a memfd|unexpected size|not the memory of this run"
        ):
            attach({**told, **wrong})
    os.close(descriptor)

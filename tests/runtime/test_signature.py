"""Signatures of collective calls, and the errors for ranks whose calls differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfcluster.runtime.collective.signature import Signature, difference, tensor_words

TENSORS = ("a float32 (2)", "b float32 (?, 3)")


@given(st.text(), st.lists(st.text()))
def test_a_signature_survives_the_wire(what: str, tensors: list[str]) -> None:
    signature = Signature(what, tuple(tensors))
    assert Signature.decoded(signature.encoded()) == signature


@given(st.lists(st.text()), st.lists(st.text()))
def test_only_equal_signatures_have_equal_digests(
    one: list[str], two: list[str]
) -> None:
    same = Signature("x", tuple(one)).digest == Signature("x", tuple(two)).digest
    assert same == (one == two)


def test_different_operations_are_listed_by_rank() -> None:
    signatures = [Signature("barrier"), Signature("metrics"), Signature("barrier")]
    assert difference(signatures) == (
        "the ranks called different operations: rank 0, 2: barrier; rank 1: metrics"
    )


def test_only_tensors_that_differ_are_listed() -> None:
    signatures = [
        Signature("g", TENSORS),
        Signature("g", (TENSORS[0], "b float32 (4)")),
    ]
    assert difference(signatures) == (
        "g: the ranks have different tensors: rank 0: b float32 (?, 3); "
        "rank 1: b float32 (4)"
    )


def test_a_long_list_is_cut() -> None:
    signatures = [Signature("g", tuple(f"{r}{i}" for i in range(9))) for r in "xy"]
    text = difference(signatures)
    assert "rank 0: x4; rank 1: y4" in text
    assert "x5" not in text
    assert text.endswith("and 4 more")


def test_tensors_that_some_ranks_lack_are_named() -> None:
    signatures = [Signature("g", TENSORS), Signature("g", TENSORS[:1])]
    assert difference(signatures) == (
        "g: the ranks have different numbers of tensors: rank 0: 2; rank 1: 1; "
        "rank 0 has b float32 (?, 3)"
    )


def test_unknown_sizes_are_shown_as_such() -> None:
    assert tensor_words("w", "float32", (None, 3)) == "w float32 (?, 3)"

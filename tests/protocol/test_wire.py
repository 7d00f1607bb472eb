"""Decoding of frames: any bytes give frames or one clear error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcluster.protocol.wire import (
    MAX_FRAME_BYTES,
    Decoder,
    Frame,
    LineBuffer,
    WireError,
    encode,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(), VALUES), max_size=5),
    st.lists(st.integers(0, 60)),
)
def test_frames_survive_any_cutting(
    contents: list[dict[str, object]], cuts: list[int]
) -> None:
    frames = [{**content, "type": "x"} for content in contents]
    data = b"".join(map(encode, frames))
    decoder, begin = Decoder(), 0
    got: list[Frame] = []
    for cut in sorted(cuts):
        got += decoder.feed(data[begin : max(begin, cut)])
        begin = max(begin, cut)
    got += decoder.feed(data[begin:])
    assert got == frames


def test_bytes_that_are_not_utf_8_survive() -> None:
    text = b"caf\xe9".decode(errors="surrogateescape")
    (frame,) = Decoder().feed(encode({"type": "env", "value": text}))
    assert frame["value"].encode(errors="surrogateescape") == b"caf\xe9"


@given(st.binary(max_size=200))
def test_garbage_is_an_error_and_never_a_crash(data: bytes) -> None:
    try:
        for frame in Decoder().feed(data + b"\n"):
            assert isinstance(frame["type"], str)
    except WireError:
        pass


@pytest.mark.parametrize(
    "line", [b"[]", b"1", b"{}", b'{"type": 1}', b"{", b"[" * 100_000, b"\xff"]
)
def test_what_is_no_frame_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        list(Decoder().feed(line + b"\n"))


def test_an_endless_line_is_refused_before_it_fills_the_memory() -> None:
    buffer = LineBuffer(limit=1000)
    assert list(buffer.feed(b"x" * 1000)) == []
    with pytest.raises(WireError):
        list(buffer.feed(b"x"))
    assert list(buffer.feed(b"y\n")) == [b"y"]


def test_a_frame_that_no_peer_would_take_is_not_sent() -> None:
    with pytest.raises(WireError, match="'big' frame"):
        encode({"type": "big", "text": "x" * MAX_FRAME_BYTES})

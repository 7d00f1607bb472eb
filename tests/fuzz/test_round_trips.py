"""What tfcluster writes, it reads back unchanged."""

from __future__ import annotations

import json
import socket
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.descriptions import describe
from tfcluster.plan.description_json import from_plain, to_plain
from tfcluster.plan.host_patterns import expand, fold, host_name_problem
from tfcluster.plan.model import Description
from tfcluster.protocol import wire
from tfcluster.protocol.frames import encode
from tfcluster.record import events
from tfcluster.runtime.collective.peer_reports import (
    Exit,
    ExitReport,
    Query,
    RankProgress,
    decode,
)
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.transports.multiplexed_sockets import (
    IncomingBytes,
    framed,
)
from tfcluster.runtime.net.buffer_pool import Pool
from tfcluster.runtime.parameter_server import messages
from tfcluster.runtime.parameter_server.messages import PsMessage
from tfcluster.schedulers.sge import slots_by_host
from tfcluster.schedulers.slurm.variables import counts

_few = settings(max_examples=40, deadline=None)
_any_text = st.text(st.characters(), max_size=20)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _any_text,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_any_text, inner, max_size=4)
    ),
    max_leaves=10,
)
_objects = st.dictionaries(_any_text, _values, max_size=5)
_label = st.from_regex(r"[a-z]{1,3}[0-9]{1,20}[a-z]?", fullmatch=True)
_names = st.lists(
    st.builds("{}{}{}".format, st.sampled_from("ab"), st.integers(0, 12), st.just(""))
    | st.builds("n{:03}-ib".format, st.integers(0, 1200))
    | st.builds("r{}n{}".format, st.integers(0, 3), st.integers(8, 11))
    | _label
    | st.ip_addresses(v=6).map(str),
    min_size=1,
    max_size=12,
)
_arrays = st.lists(
    st.builds(
        lambda shape, dtype: (
            np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
        ),
        st.lists(st.integers(0, 5), max_size=4),
        st.sampled_from(["float32", "float16", "int64", "uint8", "bool", "complex64"]),
    ),
    max_size=4,
)


@_few
@given(_objects)
def test_frames_and_events(content: dict[str, Any]) -> None:
    frame = {**content, "type": "x"}
    assert wire.parse(wire.encode(frame).removesuffix(b"\n")) == frame
    event = {**frame, "t": 1.5}
    assert events.decode([events.encode(event)]) == [event]


@_few
@given(_names)
def test_hostlists(names: list[str]) -> None:
    assert not any(map(host_name_problem, names))
    assert expand(fold(names)) == names


@_few
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_counts_of_slurm(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" for count, times in runs)
    assert counts(text) == [count for count, times in runs for _ in range(times)]


@_few
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{1,4})?", fullmatch=True),
        st.integers(1, 10**8),
        min_size=1,
    )
)
def test_host_files_of_grid_engine(slots: dict[str, int]) -> None:
    lines = [f"{name} {count} all.q@{name} UNDEFINED" for name, count in slots.items()]
    assert slots_by_host("file", "\n".join(lines)) == slots


@_few
@given(st.dictionaries(st.text(), st.text(), max_size=4), st.floats(0, 1e9))
def test_descriptions(env: dict[str, str], grace_s: float) -> None:
    description = describe({"chief": 1, "worker": 3}, env=env, grace_s=grace_s)
    text = json.dumps(to_plain(description)).encode()
    assert from_plain(Description, wire.loads(text)) == description


@_few
@given(_objects, _arrays)
def test_messages_of_parameter_servers(
    header: dict[str, Any], arrays: list[Any]
) -> None:
    header = {k: v for k, v in header.items() if k not in ("arrays", "buffer")}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(theirs, PsMessage(header, arrays))
        received = messages.receive(ours, Pool(), {})
    assert received.header == header
    assert len(received.arrays) == len(arrays)
    for sent, came in zip(arrays, received.arrays, strict=True):
        assert (sent.dtype, sent.shape) == (came.dtype, came.shape)
        assert np.array_equal(sent, came)


@_few
@given(st.binary(max_size=100), st.lists(st.integers(1, 30)), st.integers(1, 40))
def test_messages_of_ranks(data: bytes, portions: list[int], growth: int) -> None:
    incoming, rest = IncomingBytes(1, growth_bytes=growth), framed(data)
    while not incoming.done:
        view = incoming.view()
        count = min(len(view), portions.pop() if portions else 7)
        view[:count], rest = rest[:count], rest[count:]
        incoming.advance(count)
    assert bytes(incoming.data) == data
    assert not rest


@_few
@given(st.integers(0, 2**63), st.text(), st.floats(0, 1e9), st.booleans())
def test_reports_of_ranks(number: int, text: str, since_s: float, inside: bool) -> None:
    progress = RankProgress(number, text, since_s, inside)
    report = ExitReport(number, text, text, 3, {text: text})
    for message in (Query(progress), Exit(report)):
        assert decode(wire.parse(encode(message))) == message
    signature = Signature(text, (text, "a float32 (3)"))
    assert Signature.decoded(signature.encoded()) == signature

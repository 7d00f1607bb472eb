"""Frames of all classes survive the channel; anything else is one clear error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.kinds import examples, fields, values
from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol import commands, local, messages, requests, task_events
from tfcluster.protocol.frames import ProtocolError, encode, leaves, type_of
from tfcluster.protocol.wire import Frame, parse

DIRECTIONS: Mapping[type[Struct], Callable[[Frame], Any]] = {
    requests.Request: requests.decode,
    messages.Message: messages.decode,
    commands.Command: commands.decode,
    local.Make: local.decode_make,
    local.OfMaker: local.decode_of_maker,
    local.Fork: local.decode_fork,
    local.OfInterpreter: local.decode_of_interpreter,
    local.ClaimRequest: local.decode_claim,
    local.Claimed: local.decode_claimed,
    task_events.TaskEvent: task_events.decode,
}
CLASSES = [
    pytest.param(cls, decode, id=f"{base.__name__}-{cls.__name__}")
    for base, decode in DIRECTIONS.items()
    for cls in leaves(base)
]
FIELDS = [
    pytest.param(
        frame, name, kind, decode, id=f"{cls.__module__}-{cls.__name__}-{name}"
    )
    for base, decode in DIRECTIONS.items()
    for cls, frame in zip(leaves(base), examples(base), strict=True)
    for name, kind in fields(cls).items()
]


@pytest.mark.parametrize(("cls", "decode"), CLASSES)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=20)
@given(data=st.data())
def test_every_frame_survives(
    cls: type, decode: Callable[[Frame], Any], data: st.DataObject
) -> None:
    frame = data.draw(values(cls))
    again = decode(parse(encode(frame)))
    assert (again, type(again)) == (frame, cls)


@pytest.mark.parametrize(("frame", "name", "kind", "decode"), FIELDS)
def test_every_field_is_checked(
    frame: Frame, name: str, kind: Any, decode: Callable[[Frame], Any]
) -> None:
    named = f"^'{frame['type']}' frame: '{name}' "
    with pytest.raises(ProtocolError, match=f"{named}is missing"):
        decode({key: value for key, value in frame.items() if key != name})
    if kind is not object:
        is_mapping = getattr(kind, "__origin__", None) is Mapping
        with pytest.raises(ProtocolError, match=f"{named}must be"):
            decode({**frame, name: [] if is_mapping else {"a": "b"}})


@pytest.mark.parametrize("decode", DIRECTIONS.values())
def test_an_unknown_type_is_named(decode: Callable[[Frame], Any]) -> None:
    with pytest.raises(ProtocolError, match="'of the future'"):
        decode({"type": "of the future"})


def test_unknown_keys_are_ignored() -> None:
    assert requests.decode({"type": "ping", "new": [1]}) == requests.PingRequest()


@pytest.mark.parametrize(
    "change",
    [
        {"argv": "ls"},
        {"argv": ["ls", 1]},
        {"argv": None},
        {"env": {"A": 1}},
        {"env": []},
        {"attempt": True},
        {"attempt": -1},
        {"attempt": "1"},
        {"attempt": 1 << 64},
        {"cwd": None},
        {"port": 1.5},
        {"listens": 1},
        {"watched": None},
        {"warm": 3},
    ],
)
def test_a_wrong_value_is_named(change: Frame) -> None:
    (start,) = (f for f in examples(requests.Request) if f["type"] == "start")
    with pytest.raises(ProtocolError, match=f"{next(iter(change))!r} must be"):
        requests.decode({**start, **change})


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf"), "5", None, True])
def test_seconds_are_finite_and_not_negative(grace: object) -> None:
    with pytest.raises(ProtocolError, match="grace_s"):
        requests.decode({"type": "close", "grace_s": grace, "others_s": 0})


@pytest.mark.parametrize(
    "row", [["a", 1], ["a", 1, 2, 3, 4], ["a", "1", 2, 3], ["a", 1, 2, -3], "a", {}]
)
def test_rows_are_checked(row: object) -> None:
    (listed,) = (f for f in examples(messages.Message) if f["type"] == "listed")
    assert messages.decode({**listed, "files": [["a", 1, -2, 3]]})
    with pytest.raises(ProtocolError, match="'listed' frame: 'files' must be"):
        messages.decode({**listed, "files": [row]})


def test_types_are_named_after_their_classes() -> None:
    assert type_of(messages.LogError) == "log_error"
    assert type_of(messages.Ping) == "ping"

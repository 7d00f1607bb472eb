"""A valid frame of each type, found by asking the reader what it misses.

So a new type of frame, or a new key, needs no change here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tfcluster.agent import frames
from tfcluster.protocol.wire import Frame, WireError

_VALUES: tuple[Any, ...] = ("TERM", 3, True, ["a", "b"], {"A": "b", "C": None}, {}, [])
_MISSING = re.compile(r"frame: '([^']+)'")


def requests() -> list[Frame]:
    """A valid request of each type that the agent knows."""
    return [_completed({"type": kind}) for kind in sorted(frames._READERS)]


def _completed(frame: Frame) -> Frame:
    while (key := _missing(frame)) is not None:
        fitting = [v for v in _VALUES if _missing({**frame, key: v}) != key]
        assert fitting, f"no value is known that fits {key} of {frame}"
        frame = {**frame, key: fitting[0]}
    return frame


def _missing(frame: Mapping[str, Any]) -> str | None:
    """The key that the reader complains about; None: the frame is valid."""
    try:
        frames.parse_request(dict(frame))
    except WireError as error:
        said = str(error)
    else:
        return None
    match = _MISSING.search(said)
    assert match, f"the error does not name the key: {said}"
    return match[1]

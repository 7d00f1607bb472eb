"""The rules of Chrome's trace event format, as far as our files use it."""

from __future__ import annotations

import json
from typing import Any

_KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "s", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
}
_METADATA = {
    "process_name": {"name": str},
    "process_labels": {"labels": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


class Trace:
    """A file that keeps the rules: raises AssertionError otherwise."""

    def __init__(self, text: str) -> None:
        found = json.loads(text)
        assert set(found) == {"displayTimeUnit", "otherData", "traceEvents"}
        assert found["displayTimeUnit"] in ("ms", "ns")
        self.facts: dict[str, Any] = found["otherData"]
        self.events: list[dict[str, Any]] = found["traceEvents"]
        for event in self.events:
            assert set(event) == _KEYS[event["ph"]], event
            for key in {"ts", "dur", "pid", "tid"} & set(event):
                assert type(event[key]) is int, event
                assert event[key] >= 0, event
            assert isinstance(event["args"], dict), event
        metadata = [event for event in self.events if event["ph"] == "M"]
        for event in metadata:
            kinds = {key: type(value) for key, value in event["args"].items()}
            assert kinds == _METADATA[event["name"]], event
        self.processes: dict[int, str] = {
            event["pid"]: event["args"]["name"]
            for event in metadata
            if event["name"] == "process_name"
        }
        self._threads = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in metadata
            if event["name"] == "thread_name"
        }
        assert len(set(self.processes.values())) == len(self.processes)
        self.rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        """Process and row -> spans and moments."""
        for event in self.events:
            if event["ph"] != "M":
                process = self.processes[event["pid"]]
                row = self._threads[event["pid"], event["tid"]]
                self.rows.setdefault(process, {}).setdefault(row, []).append(event)
        for rows in self.rows.values():
            for events in rows.values():
                _assert_nested([event for event in events if event["ph"] == "X"])

    def names(self, process: str, row: str) -> list[str]:
        """The names of what happened in a row, in its order."""
        return [event["name"] for event in self.rows.get(process, {}).get(row, [])]


def _assert_nested(spans: list[dict[str, Any]]) -> None:
    """Two spans of a row are apart, or one contains the other."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        end = span["ts"] + span["dur"]
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], span
        ends.append(end)

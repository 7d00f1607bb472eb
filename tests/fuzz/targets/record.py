"""A run's record: events, plan, progress, logs, and how the run was launched."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.target import Target
from tests.fuzz.targets.text import bytes_of
from tests.plan.descriptions import describe
from tfcluster.base.errors import ConfigError, ContactLostError, StartError
from tfcluster.console.views import failures, status
from tfcluster.plan import description_json
from tfcluster.record import continuation, events, launched, load_run, logs
from tfcluster.record.paths import RunPaths, create_run
from tfcluster.submit import job

_NOW_S = 1795169700.0


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tfcluster-fuzz-")


@cache
def _paths() -> RunPaths:
    # The process id: a child made by fork has the same cache.
    return create_run(Path(_folder().name), "fuzz", _NOW_S + os.getpid())


def _load(data: bytes) -> None:
    """Three files in one input, as a damaged disk may leave them."""
    paths = _paths()
    plan, _, rest = data.partition(b"\n---\n")
    progress, _, found = rest.partition(b"\n---\n")
    paths.plan.write_bytes(plan)
    paths.progress.write_bytes(progress)
    paths.events.write_bytes(found)
    whole = load_run.read_run(paths, now_s=_NOW_S)
    summary = load_run.read_summary(paths, now_s=_NOW_S)
    for view in (whole, summary):
        shown = json.dumps(view.to_json())
        assert json.loads(shown)["run"]
        text = [
            *status.status(view, _NOW_S),
            *failures.outcome(view),
            *status.run_list([view], _NOW_S),
            status.status_line(view, _NOW_S),
        ]
        if view.first_failure:
            text += failures.failure(view)
        # Nothing from the record may control the terminal.
        assert all(line.replace("\n", "").isprintable() for line in text)


def _links(data: bytes) -> None:
    """The links between runs, and the events that are counted for the next run."""
    paths = _paths()
    after, _, rest = data.partition(b"\n---\n")
    before, _, found = rest.partition(b"\n---\n")
    paths.next.write_bytes(after)
    paths.previous.write_bytes(before)
    paths.events.write_bytes(found)
    for run in (continuation.latest(paths), continuation.first(paths)):
        assert run.root.parent == paths.root.parent
    following = RunPaths(paths.root.with_name(f"{paths.run}-after"))
    following.root.mkdir(exist_ok=True)
    continuation.link(paths, following)
    left = continuation.earlier(following)
    assert left.run == paths.run
    assert len(left.counted(_NOW_S, 60.0)) <= len(left.restarts)


def _lines(data: bytes) -> None:
    for event in events.decode(data.split(b"\n")):
        assert events.decode([events.encode(event)]), event


def _launched(data: bytes) -> None:
    paths = _paths()
    paths.launched.write_bytes(data)
    description = launched.launched(paths)
    again = description_json.from_plain(
        type(description), description_json.to_plain(description)
    )
    assert again == description


def _job_input(data: bytes) -> None:
    paths = _paths()
    (paths.root / job.INPUT).write_bytes(data)
    job.read_job_input(paths)


def _logs(data: bytes) -> None:
    path = _paths().root / "x.log"
    path.write_bytes(data)
    last = logs.last_lines(path, 10)
    assert len(last) <= 10

    class Set:
        def wait(self, timeout: float | None = None) -> bool:
            return True

    found = [line for _, ls in logs.follow({"x": path}, Set(), last=10) for line in ls]
    longest = logs.LINE_BYTES + len("…".encode())
    for line in (*last, *found):
        assert len(line.encode("utf-8", "surrogateescape")) <= longest


_PLAN = {
    "name": "digits",
    "backend": "ssh",
    "run": "digits-20261120-101500-3f2a",
    "hosts": [{"host": "h1", "slots": 4, "gpus": None}],
    "tasks": [{"task": "worker:0", "host": "h1", "address": "h1:40000", "log": "/x"}],
}
_PROGRESS = {
    "t": _NOW_S,
    "tasks": {
        "worker:0": {"step": 5, "steps_per_s": 2.5, "wait_share": 0.1},
        "ps:0": {"serving": {"applied": 3, "dropped": 0, "staleness_mean": 0.5}},
    },
}
_TASK = {"type": "task", "task": "worker:0", "attempt": 0}
_EVENTS = (
    {
        "t": _NOW_S,
        "type": "run",
        "run": "digits",
        "name": "digits",
        "backend": "ssh",
        "pid": 7,
        "host": "h",
        "boot_id": "b",
        "start_time": 9,
        "started": _NOW_S - 5,
        "named": True,
        "follows": "digits-1",
        "requeues": 1,
    },
    {"t": _NOW_S, "type": "host", "host": "h1", "state": "ready", "cause": None},
    {"t": _NOW_S, **_TASK, "state": "running", "pid": 12, "phase": "importing"},
    {"t": _NOW_S, **_TASK, "state": "failed", "exit_code": 1, "seconds": 3.5},
    {
        "t": _NOW_S,
        "type": "failure",
        "task": "worker:0",
        "host": "h1",
        "exit_code": 1,
        "signal": None,
        "cause": "ValueError",
        "log_tail": ["a"],
        "log": "/x",
        "secondary": False,
    },
    {"t": _NOW_S, "type": "state", "state": "stopping", "reason": "r"},
    {"t": _NOW_S, "type": "swept", "count": 2},
    {"t": _NOW_S, "type": "requeued", "job": "7", "count": 2, "restarts": [_NOW_S]},
    {"t": _NOW_S, "type": "note", "text": "a note"},
    {"t": _NOW_S, "type": "end", "state": "failed", "exit_code": 1, "reason": "r"},
)


_EARLIER = {"run": "fuzz-0", "requeues": 1, "restarts": [_NOW_S - 7.5]}


def _line(value: object) -> bytes:
    return json.dumps(value).encode()


def _all_events() -> bytes:
    return b"".join(_line(event) + b"\n" for event in _EVENTS)


def _launched_seed() -> bytes:
    description = describe({"chief": 1, "worker": 2}, env={"A": "b"})
    plain = description_json.to_plain(description)
    return _line({"schema": 1, "description": plain})


def _job_seed() -> bytes:
    description = describe({"worker": 2})
    given = job.JobInput(description=description, state=Path("/tmp"))
    return _line(description_json.to_plain(given))


_VIEWS = (status, failures, status, failures)

TARGETS = (
    Target(
        "record",
        _load,
        lambda: [
            b"\n---\n".join((_line(_PLAN), _line(_PROGRESS), _all_events())),
            b"\n---\n".join((_line(_PLAN), b"", _all_events()[:-2])),
        ],
        (),
        (b"\n---\n", b'"t":', b'"type":"task"', b'"state":"'),
    ),
    Target(
        "events",
        _lines,
        lambda: [_all_events()],
        (),
        (b'{"t":1,"type":"', b'"t":'),
        most_bytes=1 << 17,
    ),
    Target(
        "links",
        _links,
        lambda: [
            b"\n---\n".join((_line({"run": "x"}), _line(_EARLIER), _all_events())),
            b"\n---\n".join((_line({"run": "fuzz"}), _line(_EARLIER), b"")),
        ],
        (),
        (b"\n---\n", b'"type":"requeued"', b'"restarts":[', b'"run":"'),
        most_bytes=1 << 17,
    ),
    Target(
        "launched",
        _launched,
        lambda: [_launched_seed()],
        (ConfigError,),
    ),
    Target(
        "job-input",
        _job_input,
        lambda: [_job_seed()],
        (StartError, ContactLostError),
    ),
    Target(
        "logs",
        _logs,
        lambda: bytes_of("a\nb\nc\n", "x" * 20000 + "\nend", "\r\n\0\n" * 30),
        (),
        (b"\n", b"\r", b"x" * 16384),
        most_bytes=1 << 19,
    ),
)

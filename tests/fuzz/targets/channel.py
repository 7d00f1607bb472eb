"""The channel between launcher and agent in both directions, and the tasks' events."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.target import Target
from tests.plan.descriptions import describe
from tests.plan.descriptions import hosts as some_hosts
from tests.protocol.kinds import example, examples
from tfcluster import __version__
from tfcluster.agent import channel, events, loop
from tfcluster.agent.console_lines import ConsoleQueue
from tfcluster.console.screen import Screen
from tfcluster.launcher import hosts as launcher_hosts
from tfcluster.launcher import progress, task_messages
from tfcluster.launcher.agent_connection import Reception
from tfcluster.launcher.job import CurrentJob, Job
from tfcluster.launcher.live_run import Journal, LiveRun
from tfcluster.launcher.run_output import RunOutput
from tfcluster.launcher.task_files import LogCopies, TraceFiles
from tfcluster.plan.compose import compose
from tfcluster.plan.placement import place
from tfcluster.protocol import frames, messages, requests, task_events, wire
from tfcluster.protocol.wire import PROTOCOL, Decoder, Frame, WireError, encode, parse
from tfcluster.record.events import Writer
from tfcluster.record.metrics import MetricsWriter
from tfcluster.record.paths import RunPaths, create_run

_PORTION = 1 << 15
_CLOSING_S = 10.0
_NONCE = "00112233"


_REQUESTS = tuple(examples(requests.Request))


def _joined(frames_: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(map(encode, frames_))


# --- to the agent -------------------------------------------------------------------


def _requests(data: bytes) -> None:
    for frame in Decoder().feed(data + b"\n"):
        (again,) = Decoder().feed(encode(frame))
        assert again == frame
        request = requests.decode(frame)
        assert request == requests.decode(again)
        assert request == requests.decode(parse(frames.encode(request)))
        _check_numbers(request)


def _check_numbers(request: object) -> None:
    """What is a number of seconds must be one that a timer takes."""
    for name in ("lease_s", "heartbeat_s", "grace_s", "others_s"):
        seconds = getattr(request, name, 0.0)
        assert 0 <= seconds < float("inf"), name


def _channel(data: bytes) -> None:
    """The agent's channel, which must name garbage and otherwise deliver frames."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        current = loop.Loop()
        end = channel.Channel(
            current, (theirs.fileno(), os.dup(theirs.fileno())), ConsoleQueue()
        )
        heard: list[str] = []
        end.on_end = heard.append
        end.on_garbage = heard.append
        end.on_request = lambda request: end.send(messages.Note(repr(request)))
        for at in range(0, len(data), _PORTION):
            ours.send(data[at : at + _PORTION])
            if not heard:
                end.read()
            _drain(ours)
        os.close(end._out)
        _close(current)


def _close(done: loop.Loop) -> None:
    """Agents have one loop for life, so it has no such method."""
    done._selector.close()
    os.close(done._wake_out)
    os.close(done._wake_in)


def _drain(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        pass


# --- to the launcher ----------------------------------------------------------------

_ABOUT = {"task": "worker:0", "attempt": 0}
_HELLO = {
    "type": "hello",
    **vars(
        example(
            messages.Hello,
            nonce=_NONCE,
            version=__version__,
            protocol=PROTOCOL,
            addresses=("10.0.0.1", "fe80::1"),
            way_in="10.0.0.1",
        )
    ),
}
_FROM_AGENT: tuple[Frame, ...] = (
    _HELLO,
    *(
        {**frame, **{key: value for key, value in _ABOUT.items() if key in frame}}
        for frame in examples(messages.Message)
        if frame["type"] != "hello"
    ),
)
_EVENTS: tuple[Frame, ...] = tuple(examples(task_events.TaskEvent))


def _from_agent() -> Sequence[bytes]:
    told = [{"type": "event", **_ABOUT, "event": event} for event in _EVENTS]
    each = [encode(frame) for frame in (*_FROM_AGENT, *told)]
    return [*each, _joined([f for f in (*_FROM_AGENT, *told) if f["type"] != "wants"])]


@cache
def _silent() -> RunOutput:
    """Shows nothing: there is no terminal."""
    return RunOutput(Screen(None, None, environ={}), {})


class _Unopened:
    """The Starter of hosts that are never opened."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tfcluster-fuzz-")


@cache
def _job() -> Job:
    description = describe({"chief": 1, "worker": 2, "ps": 1}, backend="ssh")
    allocation = some_hosts(4)
    places = place(description, allocation)
    specs = compose(description, places, lambda program: True)
    return Job(
        run="digits-20261120-101500-3f2a",
        description=description,
        allocation=allocation,
        specs={spec.task: spec for spec in specs},
        secrets={},
        token="00",
        logs=Path(_folder().name) / "logs",
    )


@cache
def _writer() -> Writer:
    paths = create_run(Path(_folder().name), "fuzz", 1795169700.0)
    # A full disk in effect: events go nowhere, but are encoded like all others.
    writer = Writer(paths)
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer._descriptor)
    return writer


def _to_launcher(data: bytes) -> None:
    """Frames of an agent, as the launcher's loop handles them."""
    job = _job()
    with TemporaryDirectory(dir=_folder().name) as folder:
        paths = create_run(Path(folder), "fuzz", 1795169700.0)
        metrics, traces = MetricsWriter(paths, 10), TraceFiles(paths, 1000)
        try:
            _handle(data, job, paths, metrics, traces)
        finally:
            metrics.close(_CLOSING_S)
            traces.close(_CLOSING_S)


def _handle(
    data: bytes, job: Job, paths: RunPaths, metrics: MetricsWriter, traces: TraceFiles
) -> None:
    plan = {"run": job.run, "tasks": [], "hosts": []}
    journal, current = Journal(_writer(), metrics, plan), CurrentJob(job)
    run = LiveRun(current, journal, _silent(), paths)
    about_hosts = launcher_hosts.Hosts(run, _Unopened(), lambda item: None)
    latest = run.progress
    for task in job.specs:
        latest.started(task, 0.0, reports=True)
    copies = LogCopies(paths)
    about_tasks = task_messages.TaskMessages(run, about_hosts.facts, copies, traces)
    try:
        for line in wire.LineBuffer().feed(data + b"\n"):
            if line:
                message = messages.decode(parse(line))
                if about_hosts.received("h1", message) is None:
                    for event in about_tasks.received("h1", message, 1.0):
                        asdict(event)
    finally:
        copies.close(_CLOSING_S)
        journal.progress(latest.snapshot(), latest.attempts())
        journal.view().to_json()
        progress.blame(job.specs, about_tasks.answers, job.ranks(), 10.0)


def _connection(data: bytes) -> None:
    """Noise, hello and frames, in portions."""
    reception = Reception(_NONCE)
    for at in range(0, len(data), _PORTION):
        for message in reception.feed(data[at : at + _PORTION]):
            frames.encode(message)
    reception.end()


# --- from tasks ---------------------------------------------------------------------


def _task_events(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    current = loop.Loop()
    said: list[Frame] = []
    with ours:
        end = events.FrameSocket(current, theirs, said.append, lambda cause: None)
        for at in range(0, len(data), _PORTION):
            ours.send(data[at : at + _PORTION])
            end._read()
        end.finish()
    _close(current)
    for event in said:
        encode({"type": "event", "task": "worker:0", "attempt": 0, "event": event})


def _tails(data: bytes) -> None:
    """A task's last lines of output, of which the launcher makes a cause."""
    lines = [line[:2000] for line in data.decode("utf-8", "replace").split("\n")]
    tail = lines[-20:]
    cause = task_messages.cause_of_exit(code=1, signal=None, oom=False, tail=tail)
    task_messages.looks_like_victim(cause, tail)
    task_messages.cause_of_exit(code=None, signal="SIGABRT", oom=False, tail=tail)


TARGETS = (
    Target(
        "requests",
        _requests,
        lambda: [*map(encode, _REQUESTS), _joined(_REQUESTS)],
        (WireError,),
        (b'{"type":"', b'":', b"[[", b"null"),
        most_bytes=1 << 19,
    ),
    Target(
        "channel",
        _channel,
        lambda: [_joined(_REQUESTS), _joined(_FROM_AGENT)],
        (WireError,),
        most_bytes=1 << 18,
    ),
    Target(
        "to-launcher",
        _to_launcher,
        _from_agent,
        (WireError,),
        (b'{"type":"', b'"worker:0"', b'"ps:0"', b'"attempt":', b'"event":{'),
    ),
    Target(
        "connection",
        _connection,
        lambda: [
            b"Welcome to h1\r\n\x1b[1mmotd\n" + _joined((_HELLO, *_FROM_AGENT)),
            b"Permission denied\n",
        ],
        (WireError,),
        (encode(_HELLO), _NONCE.encode()),
        most_bytes=1 << 18,
    ),
    Target(
        "task-events",
        _task_events,
        lambda: [*map(encode, _EVENTS), _joined(_EVENTS)],
        (),
        (b'{"type":"', b'"step":'),
        most_bytes=1 << 16,
    ),
    Target(
        "tails",
        _tails,
        lambda: [
            b"Traceback (most recent call last):\n  File x\nValueError: bad\n",
            b"F0000 Check failed: x\nterminate called\n  a.b.c.Error\n",
            b"tensorflow.python.framework.errors_impl.UnavailableError: Socket closed",
            b"OSError: [Errno 98] Address already in use",
        ],
        (),
        (b"a.", b"Error", b"Exception:", b"address already in use", b"w" * 50),
    ),
)

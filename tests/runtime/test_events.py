"""Events that a task sends to its agent, and its answers to the agent's questions."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.harness import start_cold
from tfcluster.protocol.task_events import EpochPosition, ExchangeTotal, Waiting
from tfcluster.runtime.telemetry import agent_channel
from tfcluster.runtime.telemetry.agent_channel import Reporter, claim, numbers

STEP = {
    "type": "step",
    "steps_per_s": None,
    "wait_share": None,
    "bytes": None,
    "position": None,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, task = socket.socketpair()
    agent.settimeout(10)
    with agent, task:
        yield agent, task


def hear(agent: socket.socket, count: int) -> list[dict[str, Any]]:
    data = b""
    while data.count(b"\n") < count:
        received = agent.recv(65536)
        assert received
        data += received
    return [json.loads(line) for line in data.splitlines()]


Pair = tuple[socket.socket, socket.socket]


def test_every_event_is_a_line(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task)
    reporter.phase("joining")
    reporter.step(3, 41.52345678, 0.25)
    reporter.warning("näh\nzwei")
    reporter.note("drei")
    reporter.failure("worker:1 is gone")
    reporter.send(Waiting(1.25, "allreduce dense/kernel", (1, 2)))
    assert hear(agent, 6) == [
        {"type": "phase", "phase": "joining"},
        {**STEP, "step": 3, "steps_per_s": 41.5235, "wait_share": 0.25},
        {"type": "warning", "text": "näh\nzwei"},
        {"type": "note", "text": "drei"},
        {"type": "failure", "cause": "worker:1 is gone"},
        {
            "type": "waiting",
            "since_s": 1.25,
            "what": "allreduce dense/kernel",
            "ranks": [1, 2],
        },
    ]


def test_steps_come_at_most_once_a_second_and_the_last_is_not_lost(pair: Pair) -> None:
    agent, task = pair
    clock = Clock()
    reporter = Reporter(task, clock)
    for step in range(1, 6):
        reporter.step(step, 1.0, 0.0)
        clock.now += 0.4
    reporter.flush()
    reporter.flush()
    reporter.phase("done")
    said = hear(agent, 4)
    assert [event.get("step") for event in said] == [1, 4, 5, None]


def test_a_step_bears_the_position_that_held_when_it_was_made(pair: Pair) -> None:
    agent, task = pair
    clock = Clock()
    reporter = Reporter(task, clock)
    with reporter.keeping_position():
        reporter.position = lambda: EpochPosition(2, None, 1, None, {"loss": -0.5})
        reporter.step(1, 1.0, 0.0, 700)
        reporter.step(2, 1.0, 0.0, 1400)
    clock.now += 0.5
    reporter.flush()
    clock.now += 1
    reporter.step(3, 1.0, 0.0)
    common = {**STEP, "steps_per_s": 1.0, "wait_share": 0.0}
    inside = {"position": [2, None, 1, None, {"loss": -0.5}]}
    assert hear(agent, 3) == [
        {**common, "step": 1, "bytes": 700, **inside},
        {**common, "step": 2, "bytes": 1400, **inside},
        {**common, "step": 3},
    ]


def test_a_position_that_fails_does_not_harm_the_program(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task)
    reporter.position = lambda: EpochPosition(1 // 0, None, 1, None, {})
    reporter.step(1, 1.0, 0.0)
    assert hear(agent, 1)[0]["step"] == 1


def test_no_epoch_is_lost_and_they_come_after_their_last_step(pair: Pair) -> None:
    agent, task = pair
    clock = Clock()
    reporter = Reporter(task, clock)
    reporter.step(1, 1.0, 0.0)
    reporter.step(2, 1.0, 0.0)
    for epoch in range(1, 5):
        if epoch > 2:
            reporter.step(epoch + 10, 1.0, 0.0)
        reporter.epoch(epoch, {"loss": float(epoch), "name": "x", "nan": float("nan")})
        clock.now += 0.4
    reporter.flush()
    reporter.epoch(5, {})
    reporter.flush()
    said = hear(agent, 8)
    assert [each.get("step") for each in said[:2]] == [1, 2]
    epochs = [each for each in said if each["type"] == "epoch"]
    assert [each["epoch"] for each in epochs] == [1, 2, 3, 4, 5]
    assert [each["step"] for each in epochs] == [2, 2, 13, 14, 14]
    assert epochs[0]["metrics"] == {"loss": 1.0, "nan": None}


def test_of_very_many_epochs_every_other_one_is_reported(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task, Clock())
    for epoch in range(1, 1_000):
        reporter.epoch(epoch, {})
    reporter.flush()
    reporter.phase("end")
    agent.settimeout(5)
    said: list[int] = []
    text = b""
    while b'"end"' not in text:
        text += agent.recv(1 << 16)
    said = [event["epoch"] for event in map(json.loads, text.splitlines()[:-1])]
    assert 100 < len(said) <= 202
    assert (said[0], said[-1]) == (1, 999)
    assert said == sorted(said)


def test_what_exchanges_cost_is_told_now_and_then(pair: Pair) -> None:
    agent, task = pair
    clock = Clock()
    reporter = Reporter(task, clock)
    reporter.totals = lambda: [ExchangeTotal("gradients", 1)]
    for step in range(1, 14):
        reporter.step(step, 1.0, 0.0)
        clock.now += 1
    reporter.phase("end")
    kinds = [event["type"] for event in hear(agent, 16)]
    assert kinds.count("exchanges") == 2


class Odd:
    def __float__(self) -> float:
        raise RuntimeError


def test_only_numbers_are_metrics() -> None:
    found = numbers({"a": 1, "b": 0.123456789, "c": float("inf"), "d": [1], "e": None})
    assert found == {"a": 1.0, "b": 0.123457, "c": None}
    odd = {"f": 10**400, "g": Odd(), "h": np.array([1.0]), "i": np.float32(2)}
    assert numbers(odd) == {"i": 2.0}
    assert len(numbers({str(number): number for number in range(100)})) == 32


def test_what_json_cannot_say_is_null(pair: Pair) -> None:
    agent, task = pair
    Reporter(task).step(1, float("inf"), float("nan"))
    assert hear(agent, 1)[0] == {**STEP, "step": 1}


def test_nobody_there_is_silence() -> None:
    reporter = Reporter()
    reporter.phase("x")
    reporter.step(1, 1.0, 0.0)
    reporter.flush()
    reporter.listen()
    reporter.abandon()


def test_an_agent_that_is_gone_is_silence(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task)
    agent.close()
    reporter.warning("x")
    reporter.warning("y")


def test_an_agent_that_does_not_read_blocks_nobody(pair: Pair) -> None:
    agent, task = pair
    task.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reporter = Reporter(task)
    for number in range(1000):
        reporter.warning(f"{number} " + 1000 * "x")
    agent.setblocking(False)
    heard = b""
    while b'"end"' not in heard:
        with contextlib.suppress(BlockingIOError):
            heard += agent.recv(65536)
        # Kept events are sent along with the next one.
        reporter.warning("end")
    texts = [json.loads(line)["text"] for line in heard.splitlines()[:-1]]
    numbers = [text.split()[0] for text in texts if text != "end"]
    # Complete lines in order, until the buffer was full.
    assert numbers == [str(number) for number in range(len(numbers))]
    assert 100 < len(numbers) < 1000


def test_long_words_are_cut(pair: Pair) -> None:
    agent, task = pair
    Reporter(task).failure(100_000 * "x")
    (event,) = hear(agent, 1)
    assert event["cause"].endswith("x ...")
    assert len(event["cause"]) < 70_000


def test_stacks_show_every_thread_and_what_it_waits_for(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task)
    reporter.on_waiting(lambda: Waiting(2.0, "barrier", (1,)))
    reporter.listen()
    go = threading.Event()

    def wait_in_a_thread() -> None:
        go.wait(20)

    thread = threading.Thread(target=wait_in_a_thread, name="loader")
    thread.start()
    try:
        agent.sendall(b'{"type":"unheard of"}\n{"type":"sta')
        agent.sendall(b'cks"}\n')
        (answer,) = hear(agent, 1)
    finally:
        go.set()
        thread.join()
    assert answer["type"] == "stack"
    assert answer["waiting"] == [2.0, "barrier", [1]]
    text = answer["text"]
    assert text.startswith("Thread MainThread (most recent call last):\n")
    assert "in test_stacks_show_every_thread" in text
    assert "Thread loader (most recent call last):\n" in text
    assert "in wait_in_a_thread\n    go.wait(20)" in text
    assert "_answer" not in text


def test_a_broken_question_about_waiting_is_reported(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task)
    reporter.on_waiting(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    reporter.listen()
    agent.sendall(b'{"type":"stacks"}\n')
    (answer,) = hear(agent, 1)
    assert answer["waiting"] is None
    assert answer["text"].startswith("(what it waits for is unknown: ZeroDivisionError")


def test_nonsense_from_the_agent_harms_nothing(pair: Pair) -> None:
    agent, task = pair
    reporter = Reporter(task)
    reporter.listen()
    agent.sendall(b"nonsense\n")
    reporter.phase("alive")
    assert hear(agent, 1) == [{"type": "phase", "phase": "alive"}]


def test_the_thread_is_not_among_the_programs_threads(pair: Pair) -> None:
    before = threading.enumerate()
    Reporter(pair[1]).listen()
    assert threading.enumerate() == before


def test_only_an_own_unix_stream_socket_is_claimed(pair: Pair, tmp_path: Path) -> None:
    _, task = pair
    with (
        (tmp_path / "file").open("wb") as file,
        socket.socket() as tcp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
    ):
        for fd in (file.fileno(), tcp.fileno(), datagram.fileno(), 9999, 10**30):
            assert claim({"TFCLUSTER_EVENTS": str(fd)}, 1) is None
    for text in ("", "x", "-1", "1.5"):
        assert claim({"TFCLUSTER_EVENTS": text}, 1) is None
    assert claim({}, 1) is None
    os.set_inheritable(task.fileno(), True)
    env = {"TFCLUSTER_EVENTS": str(task.fileno())}
    claimed = claim(env, 1)
    assert claimed is not None
    claimed.detach()
    assert not task.get_inheritable()
    # A child process inherits the variables, and may have a descriptor of that number.
    assert claim(env, 2) is None


def test_a_forked_process_is_silent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, task = pair
    monkeypatch.setenv("TFCLUSTER_EVENTS", str(os.dup(task.fileno())))
    monkeypatch.setenv("TFCLUSTER_EVENTS_OWNER", str(os.getpid()))
    monkeypatch.setattr(agent_channel, "_current", None)
    reporter = agent_channel.reporter()
    assert reporter is agent_channel.reporter()
    child = os.fork()
    if child == 0:
        reporter.phase("old reporter of the child")
        agent_channel.reporter().phase("new reporter of the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    reporter.phase("parent")
    assert hear(agent, 1) == [{"type": "phase", "phase": "parent"}]
    reporter.abandon()


PROGRAM = """
import multiprocessing, os, subprocess, sys, time
from tfcluster.runtime.telemetry.agent_channel import reporter

def inner():
    reporter().phase('child')
    try:
        os.fstat(int(os.environ['TFCLUSTER_EVENTS']))
    except OSError:
        return 'closed'
    return 'open'

if __name__ == '__main__':
    events = reporter()
    events.listen()
    print(subprocess.run([sys.executable, '-c', '''
import os
try: os.fstat(int(os.environ['TFCLUSTER_EVENTS']))
except OSError: print('closed')
'''], capture_output=True, text=True, close_fds=False).stdout)
    with multiprocessing.get_context('fork').Pool(1) as pool:
        print(pool.apply(inner))
    events.phase('ready'); time.sleep(60)
"""


def test_only_the_task_itself_answers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    task = start_cold(["run", "train.py"], tmp_path)
    assert task.wait_for_event("phase") == {"type": "phase", "phase": "ready"}
    task.ask("stacks")
    text = task.wait_for_event("stack")["text"]
    assert "in <module>\n    events.phase('ready'); time.sleep(60)" in text
    assert "bootstrap" not in text
    task.ask("stacks")
    os.kill(task.pid, 15)
    ended = task.end()
    assert ended.status == -15
    # Only now: output and events take different ways.
    assert ended.output.split() == ["closed", "closed"]


def test_importing_it_is_light() -> None:
    code = "import sys, tfcluster.runtime.task.bootstrap; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"tensorflow", "keras", "numpy", "ctypes", "asyncio", "logging"}
    assert not heavy & set(loaded)

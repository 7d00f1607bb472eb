"""Tests of the events that tasks send over their events socket, and their effect."""

from __future__ import annotations

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left
from tests.kit.time_limits import allow_s

REPORT_STEPS = """
import json, os, signal, socket, sys, threading, time
events = socket.socket(fileno=int(os.environ['TFCLUSTER_EVENTS']))
rank = int(os.environ['TFCLUSTER_RANK'])
def tell(**event):
    events.sendall(json.dumps(event).encode() + b'\\n')
def tell_step(step, bytes=None, position=None):
    rates = dict(steps_per_s=20.5, wait_share=0.25)
    tell(type='step', step=step, bytes=bytes, position=position, **rates)
"""
ANSWER = """
def answer():
    for line in events.makefile():
        assert json.loads(line) == {'type': 'stacks'}
        waiting = [1.5, 'an exchange', [1]] if rank != 1 else None
        tell(type='stack', text=f'stack of {rank}', waiting=waiting)
threading.Thread(target=answer, daemon=True).start()
"""
# All ranks make five steps; then rank 1 hangs and the others wait for it.
STALL = """
for step in range(1, 6):
    tell_step(step)
    time.sleep(0.05)
print('stuck', flush=True)
if rank == 1 and 'STOP' in os.environ:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


def test_a_run_that_makes_no_steps_is_6(cluster: Cluster) -> None:
    code = REPORT_STEPS + ANSWER + STALL
    running = cluster.python(code, "--set", "progress_timeout=1s", count=3)
    exit_code, seconds = running.end_timed()
    assert exit_code == 6
    assert seconds < allow_s(6)
    report = running.report()
    cause = "no step for 1 s: worker:0, worker:2 wait for worker:1"
    assert report["first_failure"]["cause"] == cause
    assert cause in running.err
    stacks = {event["task"]: event["text"] for event in running.found("stack")}
    assert stacks == {f"worker:{rank}": f"stack of {rank}" for rank in range(3)}
    assert [task["step"] for task in report["tasks"]] == [5, 5, 5]
    assert_nothing_left(running)


def test_a_task_that_cannot_answer_is_named(cluster: Cluster) -> None:
    options = ("--set", "progress_timeout=1s", "--set", "env.STOP=1")
    running = cluster.python(REPORT_STEPS + ANSWER + STALL, *options, count=3)
    exit_code, seconds = running.end_timed()
    assert exit_code == 6
    assert seconds < allow_s(9)
    assert running.report()["first_failure"]["cause"] == (
        "no step for 1 s: worker:0, worker:2 wait for worker:1 (worker:1 did not "
        "answer: stopped, stuck outside Python, or TensorFlow not imported yet)"
    )
    assert_nothing_left(running)


def test_steps_keep_a_run_alive_and_are_shown(cluster: Cluster) -> None:
    code = REPORT_STEPS + (
        "tell(type='phase', phase='joining')\n"
        "for step in range(1, 30):\n"
        "    tell_step(step)\n"
        "    time.sleep(0.05)\n"
    )
    running = cluster.python(code, "--set", "progress_timeout=1s", count=2)
    assert running.end() == 0
    task = running.report()["tasks"][1]
    assert (task["step"], task["steps_per_s"], task["wait_share"]) == (29, 20.5, 0.25)
    assert running.found("task", task="worker:0", phase="joining")
    assert_nothing_left(running)


def test_a_program_that_says_nothing_is_not_watched(cluster: Cluster) -> None:
    running = cluster.bash("sleep 1.5", "--set", "progress_timeout=1s")
    assert running.end() == 0


def test_a_task_knows_best_why_it_fails(cluster: Cluster) -> None:
    fail = "tell(type='failure', cause='rank 1 left the ring')\nsys.exit(1)\n"
    code = REPORT_STEPS + fail
    running = cluster.python(code)
    assert running.end() == 1
    assert running.report()["first_failure"]["cause"] == "rank 1 left the ring"


HOSTILE = [
    "5",
    "[]",
    "{}",
    '{"type": 5}',
    '{"type": "step"}',
    '{"type": "step", "step": "1", "steps_per_s": [], "wait_share": {}}',
    '{"type": "step", "step": NaN, "steps_per_s": Infinity, "wait_share": -Infinity}',
    '{"type": "step", "step": 1e999, "steps_per_s": 1e999}',
    '{"type": "step", "step": ' + "9" * 4000 + "}",
    '{"type": "phase"}',
    '{"type": "phase", "phase": ["\\u001b[2J"]}',
    '{"type": "warning", "text": {"a": "\\u001b]0;x\\u0007"}}',
    '{"type": "warning", "text": "\\ud800\\u0000\\u001b[31mred"}',
    '{"type": "failure", "cause": null}',
    '{"type": "stack"}',
    '{"type": "stack", "text": 7, "waiting": [5]}',
    '{"type": "stack", "text": "x", "waiting": [1, "", [[], {}, null, "1", 99]]}',
    '{"type": "stack", "text": "x", "waiting": "everybody"}',
    "[" * 100_000,
    "not json",
    "\\xff\\xfe",
]


@pytest.mark.parametrize(
    "progress", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_nothing_that_a_task_says_harms_the_run(
    cluster: Cluster, progress: bool
) -> None:
    lines = "\n".join(HOSTILE)
    code = REPORT_STEPS + (
        f"for line in {lines!r}.splitlines():\n"
        "    events.sendall(line.encode('latin-1') + b'\\n')\n"
        "if 'STALL' in os.environ:\n"
        "    tell_step(1)\n"
        "    for line in events.makefile():\n"
        '        events.sendall(b\'{"type": "stack", "waiting": [5]}\\n\')\n'
        "time.sleep(1.2)\n"
    )
    stall = ("--set", "env.STALL=1", "--set", "progress_timeout=1s")
    running = cluster.python(code, *(stall if progress else ()))
    assert running.end() == (6 if progress else 0), running.err
    assert "internal error" not in running.err
    assert "\x1b" not in running.err
    assert_nothing_left(running)

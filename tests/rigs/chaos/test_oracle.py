"""The oracle finds what is planted, and nothing in what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.chaos import oracle
from tests.rigs.chaos.faults import END, LOCAL, RUNNING, SSH, START, faults
from tests.rigs.chaos.oracle import Injected


def injected(name: str, site: str = SSH, phase: str = RUNNING) -> Injected:
    fault = faults(site)[name]
    task = "worker:1" if name.endswith("task") else None
    return Injected(fault=fault, phase=phase, host="node2", task=task)


def status(code: int | None, **failure: Any) -> dict[str, Any]:
    state = "succeeded" if code == 0 else "lost" if failure.get("lost") else "failed"
    named = {"task": None, "host": None, "signal": None, "cause": "why", **failure}
    tasks = [{"task": "worker:0", "state": "stopped"}]
    first = named if code and failure and state == "failed" else None
    found = {"state": state, "exit_code": code, "tasks": tasks}
    return {**found, "first_failure": first}


KILLED_TASK = {"task": "worker:1", "host": "node2", "signal": "SIGKILL"}
LOST_HOST = {"host": "node2", "cause": "node2 silent for 15 s"}


@pytest.mark.parametrize(
    ("fault", "code", "found"),
    [
        (injected("kill-task"), 1, status(1, **KILLED_TASK)),
        (injected("kill-agent"), 5, status(5, **LOST_HOST)),
        (injected("kill-agent", phase=START), 4, status(4, **LOST_HOST)),
        (injected("kill-agent", phase=END), 0, status(0)),
        (injected("cut-launcher"), 5, status(5, host="node4")),
        (injected("kill-launcher"), -9, status(5, lost=True)),
        (injected("stop-task"), 0, status(0)),
        (injected("kill-guard", LOCAL), 0, status(0)),
    ],
)
def test_what_fits_is_right(fault: Injected, code: int, found: dict[str, Any]) -> None:
    assert list(oracle.outcome(code, found, [fault])) == []


@pytest.mark.parametrize(
    ("fault", "code", "found", "words"),
    [
        ("kill-task", 1, status(1, task="worker:0", signal="SIGKILL"), "worker:1 was"),
        ("kill-task", 1, status(1, **KILLED_TASK, lost=True), "first failure"),
        ("kill-task", 0, status(0), "exit code 0, expected 1"),
        ("kill-task", 1, status(1, task="worker:1", signal="SIGABRT"), "worker:1 was"),
        ("kill-agent", 5, status(5, host="node1"), "it was kill-agent of node2"),
        (
            "kill-agent",
            5,
            status(5, task="worker:1", host="node2"),
            "it was kill-agent",
        ),
        ("kill-launcher", -9, status(5, host="node1"), "has failed"),
        ("stop-task", 5, status(5, **LOST_HOST), "stop-task is harmless"),
        ("kill-agent", 5, status(4, **LOST_HOST), "but 4 in the record"),
    ],
)
def test_what_does_not_fit_is_found(
    fault: str, code: int, found: dict[str, Any], words: str
) -> None:
    wrong = list(oracle.outcome(code, found, [injected(fault)]))
    assert any(words in each for each in wrong), wrong


def test_a_run_that_is_not_over_is_found() -> None:
    found = status(1, **KILLED_TASK)
    found["tasks"][0]["state"] = "running"
    (wrong,) = oracle.outcome(1, found, [injected("kill-task")])
    assert wrong == "the state of worker:0 is 'running'"


def test_either_of_two_faults_at_once_may_be_named() -> None:
    both = [injected("kill-task"), injected("kill-agent")]
    assert not list(oracle.outcome(1, status(1, **KILLED_TASK), both))
    assert not list(oracle.outcome(5, status(5, **LOST_HOST), both))
    assert list(oracle.outcome(5, status(5, host="node1"), both))


GOOD = "up\nline 0\nline 1\nline 2\n"


@pytest.mark.parametrize(
    ("text", "ended", "words"),
    [
        (GOOD + "done 3\n", True, None),
        (GOOD, False, None),
        (GOOD + "li", False, None),
        ("", False, None),
        (GOOD, True, "ends with 'line 2'"),
        (GOOD + "done 4\n", True, "instead of 'done 3'"),
        ("up\nline 0\nline 2\n", False, "instead of 'line 1'"),
        ("up\nline 0\nline 0\n", False, "instead of 'line 1'"),
        ("line 0\n", False, "begins with"),
        (GOOD + "done 3", True, "middle of a line"),
    ],
)
def test_logs_of_the_stub(text: str, ended: bool, words: str | None) -> None:
    wrong = list(oracle.log_of_stub(text, ended=ended))
    assert bool(wrong) == (words is not None), wrong
    assert words is None or words in wrong[0]


def test_lines_that_were_not_shown_are_found() -> None:
    out = "worker:0 | up\nworker:1 | up\nworker:0 | line 0\n"
    assert not list(oracle.echo_of_stub(out, "worker:0", "up\nline 0\n"))
    assert list(oracle.echo_of_stub(out, "worker:0", "up\nline 0\nline 1\n"))
    told = out + "… 1 lines not shown, see the log files\n"
    assert not list(oracle.echo_of_stub(told, "worker:0", "up\nline 0\nline 1\n"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("events.jsonl", '{"t": 1.0}\n{"t": 2', "in the middle of a line"),
        ("events.jsonl", '{"t": 1.0}\n{"t"\n', "line 2 is damaged"),
        ("events.jsonl", '{"t": 2.0}\n{"t": 1.0}\n', "line 2 is older"),
        ("metrics.ndjson", "[]\n", "line 1 is damaged"),
        ("plan.json", '{"tasks": ', "plan.json is damaged"),
        ("report.json", "{}", "report.json has"),
    ],
)
def test_damaged_files_are_found(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    found = status(0)
    report = {key: found[key] for key in ("state", "exit_code", "tasks")}
    report["first_failure"] = None
    (tmp_path / "report.json").write_text(json.dumps(report))
    before = list(oracle.record(tmp_path, found, reported=True))
    assert [w for w in before if not w.startswith("status --json")] == []
    if name == "report.json":
        text = json.dumps({**report, "exit_code": 1})
    (tmp_path / name).write_text(text)
    wrong = list(oracle.record(tmp_path, found, reported=True))
    assert any(words in each for each in wrong), wrong


def test_a_crash_of_ours_is_found() -> None:
    assert list(oracle.words("error: tfcluster itself failed: OSError"))
    assert not list(oracle.words("first failure: worker:1 on node2: killed"))

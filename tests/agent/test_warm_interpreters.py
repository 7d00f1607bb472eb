"""Tests of tasks that are forked from a warm interpreter (here a stand-in)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import PYTHON, Agent, gone, marked
from tests.agent.test_stopping import said
from tests.kit.waiting import eventually
from tfcluster.agent import proc

STANDIN = str(Path(__file__).with_name("standin.py"))
WAIT = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as started:
        yield started


def warm(agent: Agent, mode: str = "work", key: str = "k") -> None:
    agent.send(
        type="warm",
        key=key,
        argv=[PYTHON, STANDIN, mode],
        env={"SHARED": "1", "GONE": "x"},
        cwd=str(agent.folder),
        log=str(agent.log("warm")),
    )


def fork(agent: Agent, task: str, code: str, *args: str, **keys: object) -> None:
    agent.start(task, code, *args, warm="k", **keys)


def warm_pid(agent: Agent) -> int:
    """Return the pid of the agent's only child."""
    [pid] = [p.pid for p in proc.snapshot().values() if p.ppid == agent.pid]
    return pid


def test_a_forked_task_lives_like_an_executed_one(agent: Agent) -> None:
    warm(agent)
    assert agent.wait("warmed", key="k")
    code = (
        "import os,socket,sys\n"
        "s=socket.socket(fileno=int(os.environ['TFCLUSTER_EVENTS']))\n"
        's.sendall(b\'{"type":"step","step":4}\\n\')\n'
        "print(argv[1:], os.environ['A'], 'GONE' in os.environ, os.getcwd(),\n"
        "  os.environ['TFCLUSTER_TASK'], os.environ['TFCLUSTER_RUN'],\n"
        "  os.getsid(0)==os.getpid(), file=sys.stdout)\n"
        "raise SystemExit(5)\n"
    )
    fork(agent, "w:0", code, "x y", env={"A": "ü", "GONE": None}, cwd="/")
    started = agent.wait("started", task="w:0")
    exited = agent.wait("exited", task="w:0")
    assert started["pid"] > 1
    assert exited["code"] == 5
    assert exited["tail"] == [f"['x y'] ü False / w:0 {agent.run} True"]
    assert agent.wait("event", task="w:0")["event"] == {"type": "step", "step": 4}
    assert agent.log("w:0").read_text().splitlines() == exited["tail"]


def test_requests_wait_for_the_imports(agent: Agent) -> None:
    warm(agent)
    for index in range(5):
        fork(agent, f"w:{index}", f"print({index})")
    for index in range(5):
        assert agent.wait("exited", task=f"w:{index}")["tail"] == [str(index)]


def test_an_end_may_come_before_the_answer(agent: Agent) -> None:
    warm(agent, "slow answer")
    fork(agent, "w:0", "raise SystemExit(9)")
    pid = agent.wait("started", task="w:0")["pid"]
    exited = agent.wait("exited", task="w:0")
    assert (exited["code"], gone(pid)) == (9, True)


def test_a_forked_task_is_stopped_and_killed(agent: Agent) -> None:
    warm(agent)
    fork(agent, "w:0", f"import signal; signal.signal(15, signal.SIG_IGN)\n{WAIT}")
    fork(agent, "w:1", WAIT)
    for task in ("w:0", "w:1"):
        said(agent, task)
    agent.stop("w:0", "w:1", grace_s=0.5)
    assert agent.wait("exited", task="w:1")["signal"] == "TERM"
    assert agent.wait("exited", task="w:0")["signal"] == "KILL"
    fork(agent, "w:2", "print('still warm')")
    assert agent.wait("exited", task="w:2")["tail"] == ["still warm"]


def test_a_large_request(agent: Agent) -> None:
    warm(agent)
    names = {f"BIG{i}": "v" * 100_000 for i in range(8)}
    for index in range(4):
        fork(
            agent, f"w:{index}", "import os; print(len(os.environ['BIG7']))", env=names
        )
    for index in range(4):
        assert agent.wait("exited", task=f"w:{index}")["tail"] == ["100000"]


def test_the_death_of_the_interpreter_touches_no_task(agent: Agent) -> None:
    warm(agent)
    agent.wait("warmed")
    interpreter = warm_pid(agent)
    fork(agent, "w:0", WAIT)
    pid = agent.wait("started", task="w:0")["pid"]
    os.kill(interpreter, signal.SIGKILL)
    cold = agent.wait("cold", key="k")
    assert "SIGKILL" in cold["cause"]
    assert not gone(pid)
    fork(agent, "w:1", "pass")
    assert "has ended" in agent.wait("failed", task="w:1")["cause"]
    agent.stop("w:0")
    assert agent.wait("exited", task="w:0")["signal"] == "TERM"
    warm(agent)
    agent.wait("warmed")
    fork(agent, "w:1", "print('again')", attempt=1)
    assert agent.wait("exited", task="w:1")["tail"] == ["again"]


def test_a_failed_import(agent: Agent) -> None:
    warm(agent, "import error")
    fork(agent, "w:0", "pass")
    cold = agent.wait("cold", key="k")
    assert cold["cause"] == "ended with exit code 1"
    assert cold["tail"][-1] == "ImportError: no module named nothing"
    assert "exit code 1" in agent.wait("failed", task="w:0")["cause"]
    assert "ImportError" in agent.log("warm").read_text()


def test_an_interpreter_that_cannot_be_started(agent: Agent) -> None:
    agent.send(
        type="warm",
        key="k",
        argv=["pyhton"],
        env={},
        cwd="/",
        log=str(agent.log("warm")),
    )
    assert agent.wait("cold")["cause"] == "'pyhton' not found on PATH"
    fork(agent, "w:0", "pass")
    assert "never started" in agent.wait("failed")["cause"]


def test_a_task_whose_pid_was_never_reported_is_killed(agent: Agent) -> None:
    warm(agent, "die at fork")
    code = f"import os; open('pid', 'w').write(str(os.getpid())+'\\n')\n{WAIT}"
    fork(agent, "w:0", code)
    assert "SIGKILL" in agent.wait("failed", task="w:0")["cause"]
    agent.wait("cold")
    pid_file = agent.folder / "pid"

    def written_and_gone() -> bool:
        text = pid_file.read_text() if pid_file.exists() else ""
        return not text.endswith("\n") or gone(int(text))

    eventually(written_and_gone, "the task is gone")
    eventually(lambda: len(marked(agent.run)) == 0, "nothing is left")


def test_a_refused_fork(agent: Agent) -> None:
    warm(agent, "refuse")
    fork(agent, "w:0", "pass")
    assert agent.wait("failed", task="w:0")["cause"] == "no more"


def test_an_interpreter_that_talks_nonsense_is_put_down(agent: Agent) -> None:
    warm(agent, "babble")
    fork(agent, "w:0", "pass")
    assert "'pid' must be int" in agent.wait("note")["text"]
    assert agent.wait("failed", task="w:0")["cause"]
    assert "SIGKILL" in agent.wait("cold")["cause"]


@pytest.mark.parametrize("mode", ["work", "import for ever"])
def test_close_ends_interpreters(agent: Agent, mode: str) -> None:
    warm(agent, mode)
    if mode == "work":
        agent.wait("warmed")
    fork(agent, "w:0", WAIT)
    assert agent.close(timeout_s=20) == 0
    assert not marked(agent.run)
    assert not [f for f in agent.frames if f["type"] in ("cold", "swept")]


def test_daemons_of_a_forked_task_go_with_it(agent: Agent) -> None:
    warm(agent)
    code = (
        "import os,subprocess\n"
        "p=subprocess.Popen(['sleep','600'],start_new_session=True)\n"
        "print(p.pid)\n"
    )
    fork(agent, "w:0", code)
    pid = int(agent.wait("exited", task="w:0")["tail"][0])
    assert agent.wait("swept")["count"] == 1
    assert gone(pid)


def test_a_stop_overtakes_the_fork(agent: Agent) -> None:
    warm(agent, "slow answer")
    fork(agent, "w:0", WAIT)
    agent.stop("w:0", grace_s=5)
    agent.wait("started", task="w:0")
    exited = agent.wait("exited", task="w:0", timeout_s=20)
    assert (exited["signal"], exited["stopped"]) == ("TERM", True)
